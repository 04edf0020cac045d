"""schemathesis reads our own /openapi.json and sends valid and invalid requests: the answer is never a 5xx."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.long]

if importlib.util.find_spec("schemathesis") is None:
    pytest.skip("missing tool: schemathesis (pip install 'pdserve[clients]')", allow_module_level=True)


@pytest.mark.covers("B.errors.13")
@pytest.mark.parametrize("way", ["combined", "pair"])
def test_no_generated_request_is_a_server_error(way: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    url = request.getfixturevalue(way)
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--checks", "not_a_server_error",
        "--phases", "examples,coverage,fuzzing", "--max-examples", "60", "--seed", "7", "--request-timeout", "60",
        "--workers", "1", "--no-color",  # two threads in CPython 3.11's ast.parse crash the tool
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=800, cwd=tmp_path)

    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    assert "test cases generated" in ended.stdout or "Test cases" in ended.stdout, ended.stdout[-3000:]
    body = {"model": "tiny", "prompt": "the quick brown fox", "max_tokens": 4}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=300, trust_env=False).status_code == 200
