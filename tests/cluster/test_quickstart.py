"""The second half of scripts/quickstart: it starts a cluster, queries it, and queries a running one again."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from pdserve.ports import free_ports
from pdserve.run_folder import RunFolder
from tests.cluster.conftest import ENGINE_FLAGS

pytestmark = pytest.mark.cluster


class Quickstart:
    """The module, with its own run folder and port."""

    def __init__(self, run_dir: Path, model: Path) -> None:
        (self.port,) = free_ports(1)
        self._env = {**os.environ, "PDSERVE_RUN_DIR": str(run_dir)}
        self._flags = ["--port", str(self.port), "--model", str(model), "--served-model-name", "tiny", *ENGINE_FLAGS]

    def use_fake_engine(self, model: Path) -> None:
        """Start the fake engine with this model from now on."""
        self._flags = ["--port", str(self.port), "--model", str(model), "--engine", "fake"]

    def __call__(self) -> "subprocess.CompletedProcess[str]":
        return self.run("pdserve.quickstart", *self._flags)

    def starting(self) -> "subprocess.Popen[str]":
        """Start it in its own process group, without waiting."""
        command = [sys.executable, "-P", "-m", "pdserve.quickstart", *self._flags]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self._env,
            stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_restore_ctrl_c,
        )  # fmt: skip

    def run(self, module: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-P", "-m", module, *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=300, env=self._env, stdin=subprocess.DEVNULL
        )


def _restore_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a test run in the background ignores it


@pytest.fixture
def quickstart(tmp_path: Path, tiny_model: Path) -> Iterator[Quickstart]:
    made = Quickstart(tmp_path / "run", tiny_model)
    yield made
    assert made.run("pdserve", "down").returncode == 0


@pytest.mark.long  # .ci/run runs scripts/quickstart every time
@pytest.mark.parametrize("engine", ["fake", "real"])
def test_it_starts_a_cluster_once_and_queries_it_each_time(
    quickstart: Quickstart, fake_model: Path, engine: str
) -> None:
    if engine == "fake":
        quickstart.use_fake_engine(fake_model)
    first, second = quickstart(), quickstart()

    assert first.returncode == 0, first.stderr
    assert "starting a cluster" in first.stdout
    assert "KV hop: " in first.stdout
    assert " over shm" in first.stdout
    assert second.returncode == 0, second.stderr
    assert "starting a cluster" not in second.stdout


def test_a_busy_port_is_one_line_with_the_logs_path(quickstart: Quickstart, tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", quickstart.port))

        refused = quickstart()

    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert f"--port {quickstart.port} on 127.0.0.1: in use" in line
    assert f"(logs: {tmp_path / 'run' / 'logs'})" in line


def _until(start: str, stream: "IO[str] | None") -> None:
    assert stream is not None
    while not (line := stream.readline()).startswith(start):
        assert line, "it ended"


@pytest.mark.long
def test_ctrl_c_while_it_starts_ends_it_without_a_failure_message(quickstart: Quickstart, tmp_path: Path) -> None:
    with quickstart.starting() as first:
        _until("starting prefill-0", first.stdout)
        os.killpg(first.pid, signal.SIGINT)
        output, failure = first.communicate(timeout=300)

    assert (first.returncode, failure) == (130, "")
    assert output.splitlines()[-1] == "stopping"
    assert RunFolder(tmp_path / "run").read() is None


@pytest.mark.long
def test_while_a_cluster_starts_it_reports_that_and_announces_none(quickstart: Quickstart, tmp_path: Path) -> None:
    with quickstart.starting() as first:
        _until("starting prefill-0", first.stdout)
        state = RunFolder(tmp_path / "run").read()
        assert state is not None
        os.kill(state.processes[0].pid, signal.SIGSTOP)  # so that it is still starting while we look
        try:
            second = quickstart()
        finally:
            os.killpg(first.pid, signal.SIGINT)
            os.kill(state.processes[0].pid, signal.SIGCONT)
        first.communicate(timeout=300)

    assert (second.returncode, second.stdout) == (2, "")
    words = (
        f"quickstart: a cluster is starting at http://127.0.0.1:{quickstart.port}: `pdserve status` shows its progress"
    )
    assert second.stderr.startswith(words)
    assert len(second.stderr.splitlines()) == 1


@pytest.mark.long
def test_ctrl_c_while_it_queries_ends_it_and_not_the_cluster(
    quickstart: Quickstart, tmp_path: Path, slow_fake_model: Path
) -> None:
    quickstart.use_fake_engine(slow_fake_model)
    with quickstart.starting() as first:
        _until("> ", first.stdout)
        os.killpg(first.pid, signal.SIGINT)
        _, failure = first.communicate(timeout=300)

    assert (first.returncode, failure) == (130, "")
    state = RunFolder(tmp_path / "run").read()
    assert state is not None
    assert len(state.living()) == 3
