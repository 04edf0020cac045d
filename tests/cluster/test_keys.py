"""A cluster that requires a key, over HTTPS: which processes get it, that none shows it, and that our commands work."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pdserve.client import Client
from tests.cluster.pdserve_command import Pdserve
from tests.security.certificates import Authority

pytestmark = pytest.mark.cluster
KEY = "sk-cluster-0123456789abcdef"
QUESTION = {"model": "tiny", "prompt": "hello", "max_tokens": 4}


def _shown(pdserve: Pdserve) -> str:
    """Return every command line below the supervisor, every log, and what the commands that report print."""
    below = pdserve.everything()[1:]
    lines = [" ".join(psutil.Process(process.pid).cmdline()) for process in below]
    logs = [log.read_text(errors="replace") for log in (pdserve.folder.path / "logs").iterdir()]
    reported = [pdserve(command) for command in ("status", "logs", "collect-env")]
    return "\n".join([*lines, *logs, *(one.stdout + one.stderr for one in reported)])


@pytest.mark.long
def test_a_key_by_flag_is_required_over_https_and_shown_nowhere(
    pdserve: Pdserve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Authority(tmp_path / "tls").sign("front")
    tls = ("--ssl-keyfile", files.key, "--ssl-certfile", files.cert)
    up = pdserve.up("--api-key", KEY, "--protect-metrics", *tls)
    assert up.returncode == 0, up.stderr
    base_url = pdserve.state.base_url
    pdserve.environ = {"PDSERVE_API_KEY": KEY, "PDSERVE_CERT_FILE": files.cert}
    monkeypatch.setenv("PDSERVE_CERT_FILE", files.cert)

    refused = [Client(base_url).get(path).status for path in ("/v1/models", "/metrics", "/none", "/ready")]
    status = pdserve("status")
    monkeypatch.setenv("PDSERVE_API_KEY", KEY)
    answer = Client(base_url).post("/v1/completions", QUESTION)

    assert base_url.startswith("https://")
    assert refused == [401, 401, 401, 200]
    assert status.returncode == 0, status.stderr
    assert "decode-0" in status.stdout
    assert answer.status == 200, answer.body
    assert KEY not in _shown(pdserve)


@pytest.mark.long
def test_a_key_by_variable_does_the_same_and_quickstart_shows_it(
    pdserve: Pdserve, monkeypatch: pytest.MonkeyPatch
) -> None:
    pdserve.environ = {"VLLM_API_KEY": KEY}
    up = pdserve.up()
    assert up.returncode == 0, up.stderr

    without = Client(pdserve.state.base_url).post("/v1/completions", QUESTION).status
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    command = [sys.executable, "-P", "-m", "pdserve.quickstart", *pdserve.flags]
    env = {**os.environ, "PDSERVE_RUN_DIR": str(pdserve.folder.path)}
    quickstart = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, stdin=subprocess.DEVNULL)

    assert without == 401
    assert quickstart.returncode == 0, quickstart.stderr
    assert Client(pdserve.state.base_url).post("/v1/completions", QUESTION).status == 200
    assert KEY not in _shown(pdserve)
