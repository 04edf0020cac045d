"""The `pdserve` command as a user types it, with its own run folder and port."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from pdserve.client import Client
from pdserve.ports import free_ports
from pdserve.readiness import check_ready
from pdserve.run_folder import ClusterState, ProcessRecord, RunFolder

DEADLINE_S = 300.0
_POLL_S = 0.02


class Pdserve:
    """The command over the fake engine."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = RunFolder(folder)
        self.model = model
        self.engine: tuple[str, ...] = ("--engine", "fake")
        self.program: tuple[str, ...] = (sys.executable, "-P", "-m", "pdserve")
        self.cwd: Path | None = None
        self.environ: dict[str, str] = {}
        (self.port,) = free_ports(1)

    def __call__(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            self._command(*arguments), capture_output=True, text=True, timeout=300, env=self._env, cwd=self.cwd,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def up(self, *flags: str) -> "subprocess.CompletedProcess[str]":
        """Start a cluster in the background."""
        return self("up", "--detach", *self.flags, *flags)

    def starting(self, *flags: str) -> "subprocess.Popen[str]":
        """Start one in the background, without waiting."""
        command = self._command("up", "--detach", *self.flags, *flags)
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self._env)

    def front(self, *flags: str) -> "subprocess.Popen[str]":
        """Start one in the foreground."""
        command = self._command("up", *self.flags, *flags)
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=self._env)

    def follow(self) -> "subprocess.Popen[str]":
        """Start `pdserve logs -f`."""
        command = self._command("logs", "--follow", "--lines", "0")
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=self._env)

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of every cluster here."""
        return ("--port", str(self.port), "--model", str(self.model), *self.engine, "--served-model-name", "tiny")

    @property
    def state(self) -> ClusterState:
        """The current contents of the run folder."""
        state = self.folder.read()
        assert state is not None
        return state

    @property
    def client(self) -> Client:
        """A client of the cluster."""
        return Client(f"http://127.0.0.1:{self.port}")

    @property
    def client_for_long_answers(self) -> Client:
        """One that waits for long answers."""
        return Client(f"http://127.0.0.1:{self.port}", timeout_s=DEADLINE_S)

    def record(self, name: str) -> ProcessRecord:
        """The process that has this name now."""
        return next(process for process in self.state.processes if process.name == name)

    def wait_replaced(self, dead: ProcessRecord) -> None:
        """Return when another process has replaced it and the cluster is ready with all of its instances."""
        deadline = time.monotonic() + DEADLINE_S
        while self.record(dead.name).pid == dead.pid or not self._is_whole():
            assert time.monotonic() < deadline, self("status").stdout + self("logs", "supervisor").stdout
            time.sleep(_POLL_S)

    def warm_spare(self) -> ProcessRecord:
        """Return the spare when it can become an instance."""
        deadline = time.monotonic() + DEADLINE_S
        while (spare := self.state.spare) is None or spare.note != "warm":
            assert time.monotonic() < deadline, self("status").stdout
            time.sleep(_POLL_S)
        return spare

    def wait_log(self, words: str) -> None:
        """Return when the supervisor has logged this."""
        log, deadline = self.folder.log("supervisor"), time.monotonic() + DEADLINE_S
        while words not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(_POLL_S)

    def everything(self) -> list[psutil.Process]:
        """The supervisor and all processes below it."""
        watcher = self.state.supervisor
        assert watcher is not None
        above = psutil.Process(watcher.pid)
        return [above, *above.children(recursive=True)]

    def _is_whole(self) -> bool:
        if not check_ready(self.client)[0]:
            return False
        return all(one["state"] == "living" for one in self.client.get("/ready").json()["instances"])

    def _command(self, *arguments: str) -> list[str]:
        return [*self.program, *arguments]

    @property
    def _env(self) -> dict[str, str]:
        return {**os.environ, "PDSERVE_RUN_DIR": str(self.folder.path), **self.environ}
