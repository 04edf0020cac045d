"""Instruction sets, numbers of threads, and attention on the native kernels of each instruction set."""

from collections.abc import Iterator

import pytest

from engine.attention.native import NativeAttention
from native.engine_library import ISAS
from tests.native.built import threads_with


@pytest.fixture(scope="module", params=["plain", "avx2", "avx512"])
def backend(request: pytest.FixtureRequest) -> Iterator[NativeAttention]:
    """The kernels of one instruction set, on two threads."""
    with threads_with(str(request.param), 2) as threads:
        yield NativeAttention(threads)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    """One of the instruction sets."""
    return str(request.param)


@pytest.fixture(params=[1, 3])
def num_threads(request: pytest.FixtureRequest) -> int:
    """One thread, or several."""
    return int(request.param)
