"""`pdserve up` keeps its processes running, and none of them outlives it."""

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.cluster.conftest import ENGINE_FLAGS
from tests.cluster.pdserve_command import DEADLINE_S, Pdserve
from tests.kvtransfer.rig import until
from wire.errors import Unavailable

pytestmark = pytest.mark.cluster

ASK = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
PHASES = ["process", "weights", "session", "serving"]
LONG = {"model": "tiny", "prompt": "hello", "max_tokens": 400, "ignore_eos": True}


@pytest.fixture
def slow(pdserve: Pdserve, slow_fake_model: Path) -> Pdserve:
    pdserve.model = slow_fake_model
    return pdserve


@pytest.mark.long
def test_a_killed_instance_is_restarted_and_the_supervisor_logs_it(pdserve: Pdserve) -> None:
    assert pdserve.up().returncode == 0
    dead = pdserve.record("decode-0")

    os.kill(dead.pid, signal.SIGKILL)
    pdserve.wait_replaced(dead)

    assert pdserve.client.post("/v1/completions", ASK).status == 200
    output = pdserve("logs", "supervisor").stdout
    assert "decode-0 ended with signal SIGKILL: " in output
    assert "; starting it again in 0.5 s (1 of 5 in 300 s)" in output
    assert f"started decode-0 again, pid {pdserve.record('decode-0').pid}" in output
    (line,) = (line for line in pdserve("status").stdout.splitlines() if line.startswith("decode-0"))
    assert line.split()[3:5] == [str(pdserve.record("decode-0").pid), "living"]


@pytest.mark.long
def test_the_warm_spare_replaces_an_instance_that_died(pdserve: Pdserve) -> None:
    assert pdserve.up().returncode == 0
    for name in ("decode-0", "prefill-0"):
        dead, spare = pdserve.record(name), pdserve.warm_spare()

        os.kill(dead.pid, signal.SIGKILL)
        pdserve.wait_replaced(dead)

        assert pdserve.record(name).pid == spare.pid
        until(partial(_was_replaced, pdserve, name))
        assert pdserve.client.post("/v1/completions", ASK).status == 200
    output = pdserve("status").stdout
    assert output.count("replaced decode-0 at ") == output.count("replaced prefill-0 at ") == 1
    assert "  spare " in output.splitlines()[0] or "  no spare (" in output.splitlines()[0]


@pytest.mark.long
def test_without_a_spare_a_new_process_replaces_one(pdserve: Pdserve) -> None:
    assert pdserve.up("--no-spare").returncode == 0
    dead = pdserve.record("decode-0")
    os.kill(dead.pid, signal.SIGKILL)

    pdserve.wait_replaced(dead)

    pdserve.wait_log("replaced decode-0 in ")
    assert " s by a new process: process " in pdserve("logs", "supervisor").stdout
    assert "no spare (--no-spare)" in pdserve("status").stdout


@pytest.mark.long
def test_a_killed_supervisor_leaves_nothing(pdserve: Pdserve) -> None:
    assert pdserve.up().returncode == 0
    spare = pdserve.warm_spare()
    watcher, *below = pdserve.everything()
    assert len(below) >= 4
    assert spare.pid in {process.pid for process in below}

    watcher.kill()

    _, left = psutil.wait_procs([watcher, *below], timeout=300)
    assert left == []
    assert "no cluster " in pdserve("down").stdout


@pytest.mark.long
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_while_a_detached_cluster_starts_leaves_nothing(
    pdserve: Pdserve, number: signal.Signals, status: int
) -> None:
    with pdserve.starting() as up:
        assert up.stdout is not None
        assert up.stdout.readline().startswith("starting prefill-0, decode-0, scheduler")
        everything = pdserve.everything()
        up.send_signal(number)
        rest, _ = up.communicate(timeout=DEADLINE_S)

    assert up.returncode == status
    assert "stopping" in rest.splitlines()
    _, left = psutil.wait_procs(everything, timeout=300)
    assert left == []
    assert pdserve.folder.read() is None


@pytest.mark.long
def test_down_while_a_detached_cluster_starts_ends_the_up(pdserve: Pdserve) -> None:
    with pdserve.starting() as up:
        assert up.stdout is not None
        assert up.stdout.readline().startswith("starting prefill-0, decode-0, scheduler")
        down = pdserve("down")
        _, output = up.communicate(timeout=DEADLINE_S)

    assert down.stdout == "stopped prefill-0, decode-0, scheduler\n"
    assert up.returncode == 1
    words = "the cluster was stopped before it was ready, by `pdserve down` or by a signal to its supervisor"
    assert output == f"pdserve up: {words}\n"


@pytest.mark.long
def test_ranks_die_with_the_supervisor_too(pdserve: Pdserve, tiny_model: Path) -> None:
    pdserve.model, pdserve.engine = tiny_model, ENGINE_FLAGS
    assert pdserve.up("--tensor-parallel-size", "2").returncode == 0
    watcher, *below = pdserve.everything()
    assert len(below) >= 5  # two instances of two ranks, and the scheduler

    watcher.kill()

    _, left = psutil.wait_procs([watcher, *below], timeout=300)
    assert left == []


@pytest.mark.long
def test_an_instance_that_keeps_dying_ends_the_cluster(pdserve: Pdserve) -> None:
    assert pdserve.up("--max-restarts", "1").returncode == 0
    everything = pdserve.everything()
    dead = pdserve.record("decode-0")
    (pdserve.model / "fake.json").rename(pdserve.model / "fake.json.away")
    (pdserve.model / "fake.json").write_text("{")
    try:
        os.kill(dead.pid, signal.SIGKILL)
        _, left = psutil.wait_procs(everything, timeout=DEADLINE_S)
    finally:
        (pdserve.model / "fake.json.away").replace(pdserve.model / "fake.json")

    assert left == []
    output = pdserve.folder.log("supervisor").read_text()
    assert (
        "gave up on decode-0: it died 2 times in 300 s (limit of restarts: 1). decode-0 ended with exit status 2"
        in output
    )
    assert "fake.json cannot be read" in output
    assert "pdserve up: no decode process is running; stopping the cluster: gave up on decode-0" in output


@pytest.mark.covers("B.shutdown.2")
@pytest.mark.long
def test_down_lets_running_requests_finish(slow: Pdserve) -> None:
    assert slow.up().returncode == 0
    with _Asking(slow, {**LONG, "max_tokens": 20}) as answers:
        down = slow("down")

    assert "stopped prefill-0, decode-0, scheduler" in down.stdout
    assert "killed" not in down.stdout
    assert answers == [200]


@pytest.mark.long
def test_a_fast_down_ends_all_at_once(slow: Pdserve) -> None:
    assert slow.up().returncode == 0
    everything = slow.everything()
    with _Asking(slow, LONG) as answers:
        down = slow("down", "--timeout", "0")

    assert "scheduler did not stop in time and was killed" in down.stdout
    _, left = psutil.wait_procs(everything, timeout=300)
    assert left == []
    assert answers == [None]


@pytest.mark.long
def test_logs_follow_the_supervisor_and_a_process_over_its_restart(pdserve: Pdserve) -> None:
    assert pdserve.up().returncode == 0
    dead = pdserve.record("prefill-0")
    with pdserve.follow() as following:
        assert following.stdout is not None
        os.kill(dead.pid, signal.SIGKILL)
        wanted = {"supervisor | 20", "prefill-0  | this "}
        while wanted:
            line = following.stdout.readline()
            assert line
            wanted = {start for start in wanted if not line.startswith(start)}
        following.send_signal(signal.SIGINT)
        assert following.wait(300) == 130


@pytest.mark.long
def test_any_process_of_two_pairs_can_die_while_requests_are_served(pdserve: Pdserve) -> None:
    assert pdserve.up("--prefill", "2", "--decode", "2").returncode == 0
    for name in ("prefill-0", "prefill-1", "decode-0", "decode-1", "scheduler"):
        dead = pdserve.record(name)
        os.kill(dead.pid, signal.SIGKILL)
        if name != "scheduler":  # the others serve meanwhile
            for _ in range(10):
                reply = pdserve.client.post("/v1/completions", ASK)
                assert reply.status == 200, (name, reply.body)
        pdserve.wait_replaced(dead)
        reply = pdserve.client.post("/v1/completions", ASK)
        assert reply.status == 200, (name, reply.body)

    assert [process.restarts for process in pdserve.state.processes] == [1, 1, 1, 1, 1]
    until(lambda: _blocks_used(pdserve) == [0, 0, 0, 0])


def _was_replaced(pdserve: Pdserve, name: str) -> bool:
    return [phase.name for phase in pdserve.record(name).phases] == PHASES


def _blocks_used(pdserve: Pdserve) -> list[float]:
    return [sample.value for sample in pdserve.client.metrics() if sample.name == "pdserve_kv_blocks_used"]


class _Asking:
    """One request in a thread, running when the `with` begins; at the end its status, or None without an answer."""

    def __init__(self, pdserve: Pdserve, body: dict[str, object]) -> None:
        self._pdserve, self._body = pdserve, body
        self._answers: list[int | None] = []
        self._thread = threading.Thread(target=self._request)

    def __enter__(self) -> "list[int | None]":
        self._thread.start()
        deadline = time.monotonic() + DEADLINE_S
        while not self._is_inflight():
            assert time.monotonic() < deadline
        return self._answers

    def __exit__(self, *exc: object) -> None:
        self._thread.join(DEADLINE_S)

    def _is_inflight(self) -> bool:
        samples = self._pdserve.client.metrics()
        return any(sample.value for sample in samples if sample.name == "pdserve_requests_inflight")

    def _request(self) -> None:
        try:
            self._answers.append(self._pdserve.client_for_long_answers.post("/v1/completions", self._body).status)
        except Unavailable:
            self._answers.append(None)
