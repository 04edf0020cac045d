"""Transfers run on both loops: the one that serves, and asyncio's own where that is not installed."""

import importlib.util

import pytest

LOOPS = [True, False] if importlib.util.find_spec("uvloop") else [False]


@pytest.fixture(scope="session", params=LOOPS, ids=lambda uvloop: "uvloop" if uvloop else "asyncio")
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """One loop after the other."""
    return "asyncio", {"use_uvloop": request.param}
