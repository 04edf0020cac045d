"""The warm spare of `pdserve up`: one process that has imported everything, and becomes the instance that died.

none (why) --memory is free, nothing starts--> warming up --"warm"--> warm --take--> an instance
                                                    `------died, after a wait------> none
"""

import fcntl
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from devices.host_memory import available_bytes
from pdserve.process_plan import ProcessPlan, environment, launch_flags
from pdserve.processes import Child, tell
from pdserve.restarts import Restarts
from pdserve.run_folder import ProcessRecord
from scheduler.http.keys import VARIABLES as KEYS
from telemetry.start_marks import WARM

LEAST_FREE_BYTES = 4 * 10**9
MOST_BYTES = 1 << 20
"""As in spare_process.py."""
_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""With these libgomp binds its threads to the cores it finds at its import, which an instance has set before."""
_LOOK_S = 5.0


class Spare:
    """Owns one waiting process and the pipe that its command line goes over."""

    def __init__(
        self, flags: Sequence[str], log: Path, environ: Mapping[str, str], *, pass_fds: Sequence[int] = ()
    ) -> None:
        """Start it. Raises OSError."""
        command = (sys.executable, "-P", "-m", "pdserve.spare_process", *flags)
        plan = ProcessPlan("spare", "spare", "", command, {"OPENBLAS_NUM_THREADS": "1"})  # else threads of its priority
        env = {name: value for name, value in environ.items() if name not in KEYS}
        read_end, write_end = os.pipe()
        self._write_end: int | None = write_end
        try:
            fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, MOST_BYTES)
            os.set_blocking(write_end, False)
            self.child = Child(plan, log, env, stdin=read_end, pass_fds=pass_fds)
        except OSError:
            self._close_pipe()
            raise
        finally:
            os.close(read_end)

    @property
    def is_warm(self) -> bool:
        """Whether it can become an instance now."""
        return WARM in self.child.marks and self.child.ended() is None

    def become(self, plan: ProcessPlan, log: Path, environ: Mapping[str, str]) -> Child | None:
        """Send the command line; return the process, which is an instance's from now on. None: it has been ended."""
        order = json.dumps({
            "name": plan.name, "argv": launch_flags(plan), "env": environment(plan, environ), "log": str(log),
        }).encode()  # fmt: skip
        assert self._write_end is not None
        try:
            is_whole = len(order) <= MOST_BYTES and os.write(self._write_end, order) == len(order)
        except OSError:  # it has died, or the pipe is smaller than was requested
            is_whole = False
        if not is_whole:
            self.end()
            return None
        self._close_pipe()
        self.child.become(plan, log)
        return self.child

    def end(self) -> None:
        """End it at once: it holds nothing."""
        self._close_pipe()
        tell(self.child.record, signal.SIGKILL)
        self.child.reap()

    def _close_pipe(self) -> None:
        """Once: its number may be another file's later."""
        if self._write_end is not None:
            os.close(self._write_end)
            self._write_end = None


class SpareKeeper:
    """Owns the spare of one host: makes one when there is room and nothing else starts, and again after it was used."""

    def __init__(
        self, make: Callable[[], Spare], restarts: Restarts, say: Callable[[str], None], why_none: str = "",
        free_bytes: Callable[[], int] = available_bytes,
    ) -> None:  # fmt: skip
        """`why_none`: why there is none, ever; empty where there may be one."""
        self._make, self._restarts, self._say, self._free_bytes = make, restarts, say, free_bytes
        self._never, self._why = bool(why_none), why_none or "the cluster starts"
        self._spare: Spare | None = None
        self._due = 0.0

    @property
    def record(self) -> ProcessRecord:
        """What names it for others; without one the pid is 0, and `note` says why."""
        if self._spare is None:
            return ProcessRecord("spare", "spare", 0, 0, "", "", note=self._why)
        return replace(self._spare.child.record, note="warm" if self._spare.is_warm else "warming up")

    def tick(self, now: float, *, is_calm: bool) -> None:
        """Make one where there is none; `is_calm`: no process is starting, which it would slow down."""
        if self._spare is not None and (end := self._spare.child.ended()) is not None:
            self._died(end, now)
        if self._spare is None and not self._never and is_calm and now >= self._due:
            self._start(now)

    def take(self, plan: ProcessPlan, log: Path, environ: Mapping[str, str]) -> Child | None:
        """Return the spare as the process of `plan`, None where it is not warm or cannot become one."""
        if self._spare is None or not self._spare.is_warm or launch_flags(plan) is None:
            return None
        spare, self._spare, self._why = self._spare, None, "it became " + plan.name
        return spare.become(plan, log, environ)

    def close(self) -> None:
        """End it; no other is made."""
        self._never = True
        if self._spare is not None:
            self._spare.end()
            self._spare = None

    def _start(self, now: float) -> None:
        try:
            free = self._free_bytes()
            if free < LEAST_FREE_BYTES:
                self._due = now + _LOOK_S
                self._why = f"{free / 1e9:.1f} GB of memory are free, one needs {LEAST_FREE_BYTES / 1e9:g} GB"
            else:
                self._spare = self._make()
        except OSError as error:
            self._died(f"the spare cannot be started: {error}", now)

    def _died(self, end: str, now: float) -> None:
        if self._spare is not None:
            self._spare.end()
        self._spare, wait_s = None, self._restarts.died(now)
        self._never, self._due, self._why = wait_s is None, now + (wait_s or 0.0), end
        self._say(f"{end}; {'no other is made' if wait_s is None else f'another is made in {wait_s:g} s'}")


def why_no_spare(wanted: bool, environ: Mapping[str, str]) -> str:
    """Return why there is to be none on this host, with the flag or variable; empty where there may be one."""
    if not wanted:
        return "--no-spare"
    return next((f"{name} is set" for name in _BINDING if environ.get(name)), "")
