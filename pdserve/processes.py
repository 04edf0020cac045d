"""Start, watch and stop the processes of a cluster, by pid and start time, so that a reused pid is never touched."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pdserve.layout import ProcessPlan, environment
from pdserve.run_folder import ProcessRecord, last_line, start_time

POLL_S = 0.1
SCHEDULER_GRACE_S = 35.0
INSTANCE_GRACE_S = 10.0
_KILL_WAIT_S = 5.0


class Child:
    """One process we started. `record` names it for others."""

    def __init__(self, plan: ProcessPlan, log: Path, environ: Mapping[str, str]) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        if log.exists():
            log.replace(log.with_name(log.name + ".1"))  # what the last run said last is often what one looks for
        with log.open("wb") as output:
            # Its own session: Ctrl-C reaches us alone, and we stop the cluster in order.
            self._popen = subprocess.Popen(
                plan.command, env=environment(plan, environ), stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        started = start_time(self._popen.pid) or 0
        self.record = ProcessRecord(plan.name, plan.role, self._popen.pid, started, plan.address, str(log))

    def ended(self) -> str | None:
        """Return how the process ended, with its log's last line and path, or None while it runs."""
        status = self._popen.poll()
        if status is None:
            return None
        log = Path(self.record.log)
        return f"{self.record.name} ended with {_status(status)}: {last_line(log)} (log: {log})"

    @property
    def exit_status(self) -> int | None:
        """Return the exit status, None while it runs."""
        return self._popen.poll()

    def detach(self) -> None:
        """Leave the process to itself: we no longer wait for it."""
        self._popen.returncode = self._popen.poll() or 0


def _never() -> bool:
    return False


def stop(
    processes: Sequence[ProcessRecord], scheduler_grace_s: float = SCHEDULER_GRACE_S,
    at_once: Callable[[], bool] = _never,
) -> tuple[ProcessRecord, ...]:  # fmt: skip
    """Stop processes by SIGTERM, the scheduler first so that requests can finish; return those that were killed.

    From when `at_once` says so none is given time any more.
    """
    schedulers = [process for process in processes if process.role == "scheduler"]
    others = [process for process in processes if process.role != "scheduler"]
    return (*_stop(schedulers, scheduler_grace_s, at_once), *_stop(others, INSTANCE_GRACE_S, at_once))


def _stop(
    processes: Sequence[ProcessRecord], grace_s: float, at_once: Callable[[], bool]
) -> tuple[ProcessRecord, ...]:  # fmt: skip
    for process in processes:
        _signal(process, signal.SIGTERM)
    left = _wait(processes, grace_s, at_once)
    for process in left:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    _wait(left, _KILL_WAIT_S)
    return left


def _signal(process: ProcessRecord, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(process.pid)
        try:
            # The descriptor pins the process; only then its start time proves that it is ours.
            if process.alive:
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def _wait(
    processes: Sequence[ProcessRecord], timeout_s: float, at_once: Callable[[], bool] = _never
) -> tuple[ProcessRecord, ...]:  # fmt: skip
    deadline = time.monotonic() + timeout_s
    left = tuple(process for process in processes if process.alive)
    while left and time.monotonic() < deadline and not at_once():
        time.sleep(POLL_S / 2)
        left = tuple(process for process in left if process.alive)
    return left


def _status(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
