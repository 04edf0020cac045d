"""A cluster as the guide starts it: real processes, each by start_servers.sh, with tables by `ranktable gen`.

However a test ends, leaving the `with` stops all processes and checks that none is left.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from pdserve.client import Client, Sample
from pdserve.ports import free_ports
from pdserve.readiness import check_ready
from ranktable_tools.commands import GenArguments, gen

CLONE = Path(__file__).parents[2]
START_SERVERS = CLONE / "deploy" / "PD_separate" / "start_servers.sh"
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 300.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Tables:
    """Files of one host's tables; `local_paths` in global order, the scheduler's last."""

    global_path: Path
    local_paths: tuple[Path, ...]


def generate(folder: Path, prefill: Sequence[str], decode: Sequence[str], ports: Sequence[int]) -> Tables:
    """Write tables as `ranktable gen --ports` does: the ports distinguish clusters that run at the same time."""
    listed = ",".join(map(str, ports))
    made = gen(GenArguments(prefill, decode, True, str(folder), None, listed, "cpu"), lambda line: None, {})
    return Tables(folder / made.global_name, tuple(folder / local.file_name for local in made.locals))


class Process:
    """One process of start_servers.sh, in a session of its own; `before` is a command that becomes it."""

    def __init__(self, log: Path, env: Mapping[str, str], flags: Sequence[str], before: Sequence[str] = ()) -> None:
        self._log = log
        with log.open("wb") as output:
            self._popen = subprocess.Popen(
                [*before, "sh", str(START_SERVERS), *flags],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PDSERVE_PYTHON": sys.executable, **env},
                start_new_session=True,
                cwd=log.parent,
            )

    @property
    def pid(self) -> int:
        """The process's id (the shell replaced itself)."""
        return self._popen.pid

    @property
    def log(self) -> str:
        """All its output so far."""
        return self._log.read_text(errors="replace")

    @property
    def running(self) -> bool:
        """Whether it still runs."""
        return self._popen.poll() is None

    def wait(self, timeout_s: float = START_TIMEOUT_S) -> int:
        """Return its exit status."""
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s:\n{self.log}") from None

    def send(self, number: signal.Signals) -> None:
        """Signal it, if it still runs."""
        if self.running:
            self._popen.send_signal(number)

    def descendants(self) -> list[psutil.Process]:
        """Return the processes below it."""
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []


class GuideCluster:
    """Processes are named `prefill-0`, `decode-0`, ..., `scheduler`; a test may start `scheduler-1` too. Owns them."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        *,
        prefill: Sequence[str] = ("4,5",),
        decode: Sequence[str] = ("6,7",),
        flags: Sequence[str] = (),
        tables: Tables | None = None,
    ) -> None:
        self.folder = folder
        self.names = [f"prefill-{i}" for i in range(len(prefill))] + [f"decode-{i}" for i in range(len(decode))]
        *self.ports, self.port, self.second_port = free_ports(len(self.names) + 2)
        self.tables = tables or generate(folder, prefill, decode, self.ports)
        self.flags = ("--model", str(model), "--served-model-name", "tiny", *flags)
        self.processes: dict[str, Process] = {}
        self.retired: list[Process] = []
        self.client = Client(f"http://127.0.0.1:{self.port}", timeout_s=300.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        logs = {name: process.log for name, process in self.processes.items()}
        statuses = self.stop()
        if error is not None:
            error.add_note("\n".join(f"--- {name} ---\n{log}" for name, log in logs.items()))
            return
        assert set(statuses.values()) <= {0}, (statuses, logs)

    def environment(self, name: str) -> dict[str, str]:
        """Return the guide's variables of one process."""
        position = [*self.names, "scheduler"].index("scheduler" if is_scheduler(name) else name)
        return {
            "GLOBAL_RANK_TABLE_FILE_PATH": str(self.tables.global_path),
            "RANK_TABLE_FILE_PATH": str(self.tables.local_paths[position]),
            "NODE_PORTS": ",".join(map(str, self.ports)),
            "USE_OPENAI": "1",
        }

    def start(self, *names: str, env: Mapping[str, str] | None = None, flags: Sequence[str] = ()) -> Process:
        """Start processes in this order (all, instances first, by default); return the last."""
        for name in names or (*self.names, "scheduler"):
            own = {"scheduler": self.port, "scheduler-1": self.second_port}
            port = own[name] if name in own else self.ports[self.names.index(name)]
            where = ("--host=0.0.0.0", f"--port={port}")
            if name in self.processes:
                self.retired.append(self.processes[name])
            log = self.folder / f"{name}-{len(self.retired)}.log"
            process = Process(log, self.environment(name) | dict(env or {}), (*self.flags, *where, *flags))
            self.processes[name] = process
        return process

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Return when /ready is 200; a process that ends in the meantime is an error."""
        deadline = time.monotonic() + timeout_s
        words = ""
        while time.monotonic() < deadline:
            for name, process in self.processes.items():
                assert process.running, f"{name} ended with {process.wait()}:\n{process.log}"
            ready, words = check_ready(self.client)
            if ready:
                return
            time.sleep(_POLL_S)
        raise AssertionError(f"not ready after {timeout_s} s: {words}")

    def wait_living(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Return when the scheduler has a session with every instance."""
        deadline = time.monotonic() + timeout_s
        while (states := {one["state"] for one in self.client.get("/ready").json()["instances"]}) != {"living"}:
            for name, process in self.processes.items():
                assert process.running, f"{name} ended with {process.wait()}:\n{process.log}"
            assert time.monotonic() < deadline, f"after {timeout_s} s instances are {states}"
            time.sleep(_POLL_S)

    def up(self) -> "GuideCluster":
        """Start all and wait until ready."""
        self.start()
        self.wait_ready()
        return self

    def kill(self, name: str) -> None:
        """kill -9."""
        self.processes[name].send(signal.SIGKILL)
        self.retired.append(self.processes.pop(name))
        self.retired[-1].wait()

    def gauge(self, name: str) -> list[Sample]:
        """Return the samples of one metric."""
        return [sample for sample in self.client.metrics() if sample.name == name]

    def wait_idle(self, timeout_s: float = 10.0) -> None:
        """Return when no living instance holds a block; the failure names those that do."""
        deadline = time.monotonic() + timeout_s
        used: list[Sample] = []
        while time.monotonic() < deadline:
            used = self.gauge("pdserve_kv_blocks_used")
            if used and all(sample.value == 0 for sample in used):
                return
            time.sleep(_POLL_S)
        raise AssertionError(f"blocks are still held: {used}")

    def stop(self) -> dict[str, int]:
        """Stop all, the scheduler first; return exit statuses by name, and fail if a process is left over."""
        processes = [*self.processes.values(), *self.retired]
        below = [process for one in processes for process in one.descendants()]
        statuses = {}
        schedulers = set(filter(is_scheduler, self.processes))
        for names in (schedulers, self.processes.keys() - schedulers):
            for name in names:
                self.processes[name].send(signal.SIGTERM)
            for name in names:
                try:
                    statuses[name] = self.processes[name].wait(STOP_TIMEOUT_S)
                except AssertionError:
                    self.processes[name].send(signal.SIGKILL)
                    statuses[name] = self.processes[name].wait()
        _, left = psutil.wait_procs(below, timeout=STOP_TIMEOUT_S)
        for process in left:
            process.kill()
        self.processes.clear()
        assert not left, f"processes left over: {left}"
        return statuses


def is_scheduler(name: str) -> bool:
    """Return whether a process of this name is a scheduler."""
    return name.startswith("scheduler")
