"""A compiler without vector conversions builds the sampling kernel, which draws the same tokens."""

import os
import subprocess
from pathlib import Path

import pytest

from native.compiler import find_compiler

_HERE, _NATIVE = Path(__file__).parent, Path(__file__).parents[2] / "native"
_TIMEOUT_S = 300


def test_it_draws_the_same_tokens(tmp_path: Path) -> None:
    compiler = find_compiler(os.environ)
    if compiler is None:
        pytest.skip("missing tool: a C compiler")
    drawn = []
    for flags in ([], ["-DWITHOUT_CONVERTVECTOR", "-D__builtin_convertvector=not_there"]):
        program = tmp_path / f"draw{len(flags)}"
        command = [*compiler.command, "-std=c11", "-O1", "-ffp-contract=off", *flags, "-I", str(_NATIVE)]
        command += ["-o", str(program), str(_HERE / "old_draw.c"), "-lm"]
        built = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
        assert built.returncode == 0, built.stderr
        drawn.append(subprocess.run([str(program)], capture_output=True, text=True, timeout=_TIMEOUT_S).stdout.split())

    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) > 20
