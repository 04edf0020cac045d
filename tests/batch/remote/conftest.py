"""Transfers run on both loops: the one that serves, and asyncio's own where that is not installed."""

import importlib.util
from pathlib import Path

import pytest

LOOPS = [True, False] if importlib.util.find_spec("uvloop") else [False]


@pytest.fixture(scope="session", params=LOOPS, ids=lambda uvloop: "uvloop" if uvloop else "asyncio")
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """One loop after the other."""
    return "asyncio", {"use_uvloop": request.param}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run each test of this folder on both loops, but only one case of it on the second; the rest is long."""
    seen = set()
    for item in items:
        if Path(__file__).parent not in item.path.parents or not isinstance(item, pytest.Function):
            continue
        if hasattr(item, "callspec") and item.callspec.params.get("anyio_backend") in LOOPS[1:]:
            test = item.parent, item.originalname
            if test in seen:
                item.add_marker(pytest.mark.long)
            seen.add(test)
