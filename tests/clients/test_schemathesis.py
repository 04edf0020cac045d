"""schemathesis: requests after /openapi.json: each of a text model without an id in its path has a 200, none a 5xx."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from scheduler.app import open_routes
from scheduler.config import SchedulerOptions
from scheduler.model.kind import ModelKind

pytestmark = [pytest.mark.cluster, pytest.mark.long]

if importlib.util.find_spec("schemathesis") is None:
    pytest.skip("missing tool: schemathesis (pip install 'pdserve[clients]')", allow_module_level=True)


_COUNTED = re.compile(
    r'^pdserve_http_requests_total\{method="(\w+)",route="([^"]+)",status="200"\} (\S+)$', re.MULTILINE
)


@pytest.mark.covers("B.errors.13")
@pytest.mark.parametrize("way", ["combined", "pair"])
def test_every_operation_reaches_a_200_and_none_a_5xx(
    way: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:  # fmt: skip
    url = request.getfixturevalue(way)
    before, operations = _answered(url), _operations(url)
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--checks", "not_a_server_error",
        "--phases", "examples,coverage,fuzzing", "--max-examples", "60", "--seed", "7", "--request-timeout", "60",
        "--workers", "1", "--no-color",  # two threads in CPython 3.11's ast.parse crash the tool
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1500, cwd=tmp_path)

    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    assert "test cases generated" in ended.stdout or "Test cases" in ended.stdout, ended.stdout[-3000:]
    reached = {operation for operation, count in _answered(url).items() if count > before.get(operation, 0.0)}
    assert operations - reached == set()
    body = {"model": "tiny", "prompt": "the quick brown fox", "max_tokens": 4}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=300, trust_env=False).status_code == 200


def _operations(url: str) -> set[tuple[str, str]]:
    """Return the methods and paths that a text model answers; those with an id are counted under one name."""
    paths = httpx.get(f"{url}/openapi.json", timeout=60, trust_env=False).json()["paths"]
    others = {route.path for route in open_routes(SchedulerOptions()) if ModelKind.TEXT not in route.needs}
    answered = [path for path in paths if "{" not in path and path not in others]
    return {(method.upper(), path) for path in answered for method in paths[path]}


def _answered(url: str) -> dict[tuple[str, str], float]:
    """Return how many requests of each operation had a 200 so far."""
    page = httpx.get(f"{url}/metrics", timeout=60, trust_env=False).text
    return {(method, route): float(count) for method, route, count in _COUNTED.findall(page)}
