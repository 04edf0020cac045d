"""Transfers are tested on both event loops: uvloop, which serves where it is installed, and asyncio's own."""

import importlib.util

import pytest

LOOPS = [True, False] if importlib.util.find_spec("uvloop") else [False]


@pytest.fixture(scope="session", params=LOOPS, ids=lambda uvloop: "uvloop" if uvloop else "asyncio")
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """One loop after the other."""
    return "asyncio", {"use_uvloop": request.param}
