"""`pdserve up --detach`, `status`, `logs` and `down` as a user types them."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.pdserve_command import DEADLINE_S, Pdserve
from tests.kvtransfer.rig import until

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def detached(tmp_path_factory: pytest.TempPathFactory, fake_model: Path) -> Iterator[Pdserve]:
    """One cluster in the background, for the tests that only need a running one."""
    command = Pdserve(tmp_path_factory.mktemp("up") / "run", fake_model)
    up = command.up()
    assert up.returncode == 0, up.stderr
    state = command.state
    yield command
    assert "stopped prefill-0, decode-0, scheduler" in command("down").stdout
    assert state.living() == ()


def test_a_detached_cluster_serves_until_down(detached: Pdserve) -> None:
    assert len(detached.state.living()) == 3
    reply = detached.client.post("/v1/completions", {"model": "tiny", "prompt": "hello", "max_tokens": 4})
    assert reply.status == 200, reply.body
    status = detached("status")
    assert status.returncode == 0, status.stderr
    assert [line.split()[0] for line in status.stdout.splitlines()[2:]] == ["prefill-0", "decode-0", "scheduler"]
    assert "prefill" in detached("logs", "prefill-0").stdout


def test_a_second_up_is_refused_with_the_first_ones_address(detached: Pdserve) -> None:
    second = detached.up()

    assert second.returncode == 2
    assert f"already runs at http://127.0.0.1:{detached.port}" in second.stderr


def test_a_busy_port_is_one_line(detached: Pdserve, tmp_path: Path, fake_model: Path) -> None:
    other = Pdserve(tmp_path / "other", fake_model)
    other.port = detached.port

    refused = other.up()

    assert refused.returncode == 2
    assert refused.stderr.splitlines() == [f"pdserve up: --port {other.port} on 127.0.0.1: in use by another process"]


@pytest.mark.long
def test_while_one_starts_a_second_up_reports_that(pdserve: Pdserve) -> None:
    with pdserve.starting() as first:
        assert first.stdout is not None
        assert first.stdout.readline().startswith("starting ")
        loading = pdserve.record("prefill-0")
        os.kill(loading.pid, signal.SIGSTOP)  # so that it is still starting while we look
        try:
            second = pdserve.up()
        finally:
            os.kill(loading.pid, signal.SIGCONT)
        first.communicate(timeout=DEADLINE_S)

    url = f"http://127.0.0.1:{pdserve.port}"
    words = f"a cluster is starting at {url}: `pdserve status` shows its progress, `pdserve down` stops it"
    assert (second.returncode, second.stderr) == (2, f"pdserve up: {words}\n")
    assert first.returncode == 0
    assert not pdserve.state.is_starting


@pytest.mark.long
def test_a_process_that_dies_at_start_is_named_with_line_and_log(pdserve: Pdserve, tmp_path: Path) -> None:
    bad = tmp_path / "bad-model"
    bad.mkdir()
    for file in pdserve.model.iterdir():
        (bad / file.name).write_bytes(file.read_bytes())
    (bad / "fake.json").write_text(json.dumps({"num_layers": 2}) + "}")
    pdserve.model = bad

    failed = pdserve.up()

    assert failed.returncode == 2
    line = failed.stderr.splitlines()[-1]
    assert "ended with exit status 2" in line
    assert "fake.json cannot be read" in line
    assert f"(log: {pdserve.folder.path}/logs/" in line
    assert pdserve.folder.read() is None


def test_down_with_nothing_running_is_fine(pdserve: Pdserve) -> None:
    down = pdserve("down")

    assert down.returncode == 0
    assert "no cluster " in down.stdout  # it begins otherwise where one of the user's own serves on port 9000


@pytest.mark.covers("B.shutdown.3")
@pytest.mark.long
def test_in_the_foreground_it_stops_all_on_sigterm(pdserve: Pdserve) -> None:
    with pdserve.front() as front:
        assert front.stdout is not None
        lines = iter(front.stdout.readline, "")
        assert any(line.startswith("ready:") for line in lines)
        state = pdserve.state
        front.terminate()

        assert front.wait(300) == 0
        assert state.living() == ()


@pytest.mark.long
def test_repeated_ctrl_c_ends_it_as_a_single_one_does(pdserve: Pdserve) -> None:
    with pdserve.front() as up:
        assert up.stdout is not None
        while not (line := up.stdout.readline()).startswith("starting"):
            assert line, "it ended"
        until(lambda: (state := pdserve.folder.read()) is not None and len(state.living()) == 3)
        while up.poll() is None:
            up.send_signal(signal.SIGINT)

        assert up.returncode == 130, up.stdout.read()


@pytest.mark.combinations(1)
@pytest.mark.parametrize("presses", [1, 2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("wanted", "status", "words"),
    [
        ("starting", 130, "stopping"),
        pytest.param(
            "ready:",
            0,
            "stopping; requests in progress have 30 s to finish (a second signal stops them at once)",
            marks=pytest.mark.long,
        ),
    ],
)
def test_ctrl_c_leaves_nothing_however_often_it_is_pressed(
    pdserve: Pdserve, wanted: str, status: int, words: str, presses: int
) -> None:
    with pdserve.front() as up:
        assert up.stdout is not None
        while not (line := up.stdout.readline()).startswith(wanted):
            assert line, "it ended"
        until(lambda: (state := pdserve.folder.read()) is not None and len(state.living()) == 3)
        state = pdserve.folder.read()
        assert state is not None
        for _ in range(presses):
            up.send_signal(signal.SIGINT)
            time.sleep(0.05)
        rest, _ = up.communicate(timeout=300)

        assert up.returncode == status, rest
        assert words in rest.splitlines()
        assert state.living() == ()
        assert pdserve.folder.read() is None
