"""Coroutine tests marked `anyio` run on asyncio alone."""

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The one loop we run on."""
    return "asyncio"
