"""scripts/quickstart's second half: it starts a cluster, asks it, and asks a running one again."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.ports import free_ports
from tests.cluster.conftest import ENGINE_FLAGS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


class Quickstart:
    """The module, with a run folder and a port of its own."""

    def __init__(self, run_dir: Path, model: Path) -> None:
        (self.port,) = free_ports(1)
        self._env = {**os.environ, "PDSERVE_RUN_DIR": str(run_dir)}
        self._flags = ["--port", str(self.port), "--model", str(model), "--served-model-name", "tiny", *ENGINE_FLAGS]

    def __call__(self) -> "subprocess.CompletedProcess[str]":
        return self.run("pdserve.quickstart", *self._flags)

    def run(self, module: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-P", "-m", module, *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=120, env=self._env, stdin=subprocess.DEVNULL
        )


@pytest.fixture
def quickstart(tmp_path: Path, tiny_model: Path) -> Iterator[Quickstart]:
    made = Quickstart(tmp_path / "run", tiny_model)
    yield made
    assert made.run("pdserve", "down").returncode == 0


def test_it_starts_a_cluster_once_and_asks_it_each_time(quickstart: Quickstart) -> None:
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
