"""`pdserve up --schedulers 2`: both serve one port, and it stays open while one of them restarts."""

import os
import signal
import time

import pytest

from pdserve.client import Client
from tests.cluster.pdserve_command import DEADLINE_S, Pdserve
from wire.errors import Unavailable

pytestmark = [pytest.mark.cluster, pytest.mark.long]

ASK = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "temperature": 0}


def own_client(pdserve: Pdserve, name: str) -> Client:
    return Client(f"http://{pdserve.record(name).address}", timeout_s=DEADLINE_S)


def wait_restarted(pdserve: Pdserve, name: str, pid: int) -> None:
    """Return when another process has this name and serves at its own port."""
    deadline = time.monotonic() + DEADLINE_S
    while pdserve.record(name).pid == pid or not _is_ready(own_client(pdserve, name)):
        assert time.monotonic() < deadline, pdserve("logs", "supervisor").stdout
        time.sleep(0.02)


def _is_ready(client: Client) -> bool:
    try:
        return client.get("/ready").status == 200
    except Unavailable:
        return False


def states(pdserve: Pdserve) -> dict[str, str]:
    rows = [line.split() for line in pdserve("status").stdout.splitlines()[2:]]
    return {row[0]: row[4] for row in rows if row and row[0].startswith("scheduler-")}


def test_two_schedulers_serve_one_port_and_one_takes_over(pdserve: Pdserve) -> None:
    assert pdserve.up("--schedulers", "2").returncode == 0
    names = ("scheduler-0", "scheduler-1")
    answers = [own_client(pdserve, name).post("/v1/completions", ASK).json() for name in names]
    texts = {answer["choices"][0]["text"] for answer in answers}
    assert len(texts) == 1, texts
    assert states(pdserve) == dict.fromkeys(names, "ready")

    for name in names:
        dead = pdserve.record(name)
        os.kill(dead.pid, signal.SIGKILL)
        for _ in range(20):  # the other one takes them, or the spare that replaces it
            answer = pdserve.client_for_long_answers.post("/v1/completions", ASK).json()
            assert answer["choices"][0]["text"] in texts
        assert pdserve("role", "decode-0", "decode").returncode == 0
        wait_restarted(pdserve, name, dead.pid)
    assert states(pdserve) == dict.fromkeys(names, "ready")
    assert "pdserve_instance_info" in own_client(pdserve, names[1]).get("/metrics").body.decode()


def test_a_stopped_scheduler_keeps_no_client_of_the_port_waiting(pdserve: Pdserve) -> None:
    assert pdserve.up("--schedulers", "2").returncode == 0
    stopped = pdserve.record("scheduler-0")
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        for _ in range(10):
            assert pdserve.client_for_long_answers.post("/v1/completions", ASK).status == 200
        assert states(pdserve) == {"scheduler-0": "silent", "scheduler-1": "ready"}
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
    assert own_client(pdserve, "scheduler-0").post("/v1/completions", ASK).status in (200, 503)
    wait_restarted(pdserve, "scheduler-0", 0)
