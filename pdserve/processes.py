"""Start, watch and stop the processes of a cluster by pid and start time, so that a reused pid is never signalled."""

import contextlib
import os
import signal
import subprocess
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from pdserve import parent_death
from pdserve.process_plan import ProcessPlan, environment
from pdserve.run_folder import ProcessRecord, last_line, open_log, start_time
from ranktable_tools.worker_kind import VARIABLE as WORKER
from telemetry.start_marks import VARIABLE as START_PIPE
from telemetry.start_marks import Mark, MarkReader

POLL_S = 0.1
SCHEDULER_GRACE_S = 35.0
INSTANCE_GRACE_S = 10.0
KILL_WAIT_S = 5.0


class Watched(Protocol):
    """A process that a supervisor watches, on this or another machine."""

    @property
    def record(self) -> ProcessRecord:
        """Return its current record."""
        ...

    @property
    def exit_status(self) -> int | None:
        """Return the exit status, None while it runs and if it never started."""
        ...

    @property
    def marks(self) -> Mapping[str, Mark]:
        """Return its start-up marks by name; empty where it sets none."""
        ...

    def ended(self) -> str | None:
        """Return how it ended, with a message, or None while it runs."""
        ...


class Child:
    """One process started by us, with its `record`. A child that uses parent_death.py dies with us.

    `again`: the child replaces one that died, and appends to that one's log. It starts in `folder`, by
    default ours, with `stdin`, by default none, and the descriptors `pass_fds`. The starting thread must live on: to
    the kernel, that thread is the parent. A worker of another engine ends with all processes that it started: vLLM's
    engine would outlive a killed server, and keep its ports and memory. Raises OSError.
    """

    def __init__(
        self, plan: ProcessPlan, log: Path, environ: Mapping[str, str], *, again: bool = False,
        folder: Path | None = None, stdin: int = subprocess.DEVNULL, pass_fds: Sequence[int] = (),
    ) -> None:  # fmt: skip
        held, ours = os.pipe()
        weakref.finalize(self, os.close, ours)
        read_end, marked = os.pipe()
        self._is_worker = WORKER in plan.env
        self._reader = MarkReader(read_end)
        weakref.finalize(self, self._reader.close)
        env = environment(plan, environ) | {parent_death.VARIABLE: str(held), START_PIPE: str(marked)}
        try:
            with open_log(log, anew=not again) as output:
                # Its own session: Ctrl-C reaches only us, and we stop the cluster in an orderly way.
                self._popen = subprocess.Popen(
                    plan.command, env=env, stdin=stdin, stdout=output, stderr=subprocess.STDOUT,
                    start_new_session=True, pass_fds=(held, marked, *pass_fds), cwd=folder,
                )  # fmt: skip
        finally:
            os.close(held)
            os.close(marked)
        started = start_time(self._popen.pid) or 0
        self.record = ProcessRecord(plan.name, plan.role, self._popen.pid, started, plan.address, str(log))

    def become(self, plan: ProcessPlan, log: Path) -> None:
        """Change the record: this spare has received its command line."""
        self.record = replace(self.record, name=plan.name, role=plan.role, address=plan.address, log=str(log))

    def reap(self) -> None:
        """Wait for the killed process, so that no zombie remains."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(KILL_WAIT_S)

    @property
    def marks(self) -> Mapping[str, Mark]:
        """Return its start-up marks by name."""
        return self._reader.marks()

    def ended(self) -> str | None:
        """Return how the process ended, with its log's last line and path, or None while it runs."""
        status = self.exit_status
        if status is None:
            return None
        log = Path(self.record.log)
        return f"{self.record.name} ended with {describe_status(status)}: {last_line(log)} (log: {log})"

    @property
    def exit_status(self) -> int | None:
        """Return the exit status, None while it runs."""
        if self._is_worker and self._popen.returncode is None:
            if not _has_ended(self._popen.pid):
                return None
            os.killpg(self._popen.pid, signal.SIGKILL)  # before it is reaped: until then its id is not reused
        return self._popen.poll()


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _never_stop() -> bool:
    return False


def stop(
    processes: Sequence[ProcessRecord], scheduler_grace_s: float = SCHEDULER_GRACE_S,
    at_once: Callable[[], bool] = _never_stop,
) -> tuple[ProcessRecord, ...]:  # fmt: skip
    """Stop processes by SIGTERM, the scheduler first so that requests can finish; return those that were killed.

    Once `at_once` returns true, the rest is killed without delay.
    """
    schedulers = [process for process in processes if process.role == "scheduler"]
    others = [process for process in processes if process.role != "scheduler"]
    return (*_stop(schedulers, scheduler_grace_s, at_once), *_stop(others, INSTANCE_GRACE_S, at_once))


def stop_children(
    children: Sequence[Watched], scheduler_grace_s: float = SCHEDULER_GRACE_S,
    at_once: Callable[[], bool] = _never_stop,
) -> tuple[ProcessRecord, ...]:  # fmt: skip
    """Stop the processes on this machine, as `stop` does, and those that a worker's server leaves running."""
    here = [child for child in children if child.record.is_here]
    killed = stop([child.record for child in here], scheduler_grace_s, at_once)
    for child in here:
        child.ended()  # reaps it, and before that kills its group
    return killed


def _stop(
    processes: Sequence[ProcessRecord], grace_s: float, at_once: Callable[[], bool]
) -> tuple[ProcessRecord, ...]:  # fmt: skip
    for process in processes:
        send_signal(process, signal.SIGTERM)
    left = wait(processes, grace_s, at_once)
    for process in left:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    wait(left, KILL_WAIT_S)
    return left


def send_signal(process: ProcessRecord, number: signal.Signals) -> None:
    """Send a signal to the process, unless it has ended."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(process.pid)
        try:
            # The descriptor pins the process; only then does its start time prove that it is ours.
            if process.alive:
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def wait(
    processes: Sequence[ProcessRecord], timeout_s: float, at_once: Callable[[], bool] = _never_stop
) -> tuple[ProcessRecord, ...]:  # fmt: skip
    """Wait until all have ended, `timeout_s` at most; return those that have not."""
    deadline = time.monotonic() + timeout_s
    left = tuple(process for process in processes if process.alive)
    while left and time.monotonic() < deadline and not at_once():
        time.sleep(POLL_S / 2)
        left = tuple(process for process in left if process.alive)
    return left


def describe_status(status: int) -> str:
    """Describe an exit status; a negative one is a signal's."""
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
