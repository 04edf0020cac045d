"""A compiler without AVX512-BF16 and AMX still builds the other kernels."""

import os
import platform
import subprocess
from pathlib import Path

import pytest

from native.compiler import find_compiler

_HERE, _NATIVE = Path(__file__).parent, Path(__file__).parents[2] / "native"
_TIMEOUT_S = 300


@pytest.mark.skipif(platform.machine() != "x86_64", reason="these instructions are of x86-64")
def test_a_kernel_the_compiler_lacks_is_replaced_by_the_next_best(tmp_path: Path) -> None:
    compiler = find_compiler(os.environ)
    if compiler is None:
        pytest.skip("missing tool: a C compiler")
    program = tmp_path / "old"
    command = [*compiler.command, "-std=c11", "-O0", "-I", str(_NATIVE), "-o", str(program)]

    built = subprocess.run(
        [*command, str(_HERE / "old_compiler.c"), "-lm"], capture_output=True, text=True, timeout=_TIMEOUT_S
    )

    assert built.returncode == 0, built.stderr
    assert subprocess.run([str(program)], timeout=_TIMEOUT_S).returncode == 0
