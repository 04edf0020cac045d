"""The kernels for AVX512-BF16 and AMX with these instructions emulated in C, tested on CPUs that lack them."""

import os
import platform
import subprocess
from pathlib import Path

import pytest

from native.cache import NoNative
from native.compiler import find_compiler
from native.engine_library import build_engine

_HERE, _NATIVE = Path(__file__).parent, Path(__file__).parents[2] / "native"
_TIMEOUT_S = 300


@pytest.mark.long
def test_bfloat16_instructions_are_used_correctly(tmp_path: Path) -> None:
    compiler = find_compiler(os.environ)
    if compiler is None or platform.machine() != "x86_64" or "avx512" not in _built_isas():
        pytest.skip("it takes a C compiler and a CPU with AVX512")
    program = tmp_path / "emulated"
    command = [*compiler.command, "-std=gnu11", "-O1", "-I", str(_NATIVE), "-o", str(program)]
    sources = [str(_HERE / "emulated_bf16.c"), str(_NATIVE / "isa.c"), "-lm"]
    subprocess.run([*command, *sources], check=True, capture_output=True, timeout=_TIMEOUT_S)

    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=_TIMEOUT_S)

    assert (done.returncode, done.stdout) == (0, "")


def _built_isas() -> tuple[str, ...]:
    try:
        return build_engine().isas
    except NoNative:
        return ()
