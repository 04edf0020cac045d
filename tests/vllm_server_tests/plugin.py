"""pytest's plugin in the process that runs a file of vLLM's tests: selects the tests of the server, writes results.

A test is one of the server if it starts one, or has a fixture that does or is named so.
"""

import inspect
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_server_tests.image_server import ImageServer
from tests.vllm_server_tests.left_out_names import leaves_out
from tests.vllm_server_tests.plugin_variables import LEFT_OUT, RESULTS
from tests.vllm_server_tests.pooled_names import HfRunner
from tests.vllm_server_tests.stand_ins import install_stand_ins

install_stand_ins()


@pytest.fixture(scope="session")
def hf_runner() -> type[HfRunner]:
    """transformers as the reference."""
    return HfRunner


@pytest.fixture(scope="session")
def local_asset_server() -> Iterator[ImageServer]:
    """Images by name."""
    server = ImageServer()
    yield server
    server.close()


@pytest.fixture
def image_url(request: pytest.FixtureRequest, local_asset_server: ImageServer) -> str:
    """The URL of an image."""
    return local_asset_server.url_for(request.param)


@pytest.fixture
def image_urls(request: pytest.FixtureRequest, local_asset_server: ImageServer) -> list[str]:
    """The URLs of images."""
    return [local_asset_server.url_for(name) for name in request.param]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the server that are not left out."""
    left_out = json.loads(os.environ.get(LEFT_OUT, "[]"))
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        item._nodeid = item.nodeid  # type: ignore[attr-defined]  # schemathesis reads it, and pytest 9.2 has none
        chosen = _starts_a_server(item)
        if chosen and any(leaves_out(key, _name(item)) for key in left_out):
            chosen = False
            _write(_name(item), "left out", "")
        (kept if chosen else dropped).append(item)
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write the result of each phase that says something."""
    if report.when == "call" or report.outcome != "passed":
        _write(report.nodeid.partition("::")[2], report.outcome, report.longreprtext)


def _starts_a_server(item: pytest.Item) -> bool:
    fixtures: dict[str, Any] = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
    if any(name.endswith("server") for name in fixtures):
        return True
    functions = [one.func for found in fixtures.values() for one in found] + [item.function]  # type: ignore[attr-defined]
    return any("Remote" in source and "Server(" in source for source in map(_source, functions))


def _source(function: Any) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""


def _name(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[2]


def _write(name: str, outcome: str, message: str) -> None:
    with Path(os.environ[RESULTS]).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"name": name, "outcome": outcome, "message": message}) + "\n")
