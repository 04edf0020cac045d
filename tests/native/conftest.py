"""Attention on the native kernels of each instruction set."""

from collections.abc import Iterator

import pytest

from engine.attention.native import NativeAttention
from tests.native.built import threads_with


@pytest.fixture(scope="module", params=["plain", "avx2", "avx512"])
def backend(request: pytest.FixtureRequest) -> Iterator[NativeAttention]:
    """The kernels of one instruction set, on two threads."""
    with threads_with(str(request.param), 2) as threads:
        yield NativeAttention(threads)
