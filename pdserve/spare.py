"""The warm spare of `pdserve up`: a process with all imports done that replaces one that died.

It becomes an instance, or one of several schedulers.

none (reason) --memory is free, nothing starts--> warming up --"warm"--> warm --take--> a process of the cluster
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
from pdserve.processes import Child, send_signal
from pdserve.restarts import Restarts
from pdserve.run_folder import ProcessRecord
from scheduler.http.keys import VARIABLES as KEYS
from telemetry.start_marks import WARM

MIN_FREE_BYTES = 4 * 10**9
MAX_BYTES = 1 << 20
"""The same as in spare_process.py."""
_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""If one is set, libgomp binds its threads to the cores allowed at import, when a spare's own are not yet known."""
_POLL_S = 5.0


class Spare:
    """Owns one waiting process and the pipe to send its command line."""

    def __init__(
        self, flags: Sequence[str], log: Path, environ: Mapping[str, str], *, pass_fds: Sequence[int] = ()
    ) -> None:
        """Start it. Raises OSError."""
        command = (sys.executable, "-P", "-m", "pdserve.spare_process", *flags)
        # Otherwise OpenBLAS would start threads during the warm-up, and they would keep its low priority.
        plan = ProcessPlan("spare", "spare", "", command, {"OPENBLAS_NUM_THREADS": "1"})
        env = {name: value for name, value in environ.items() if name not in KEYS}
        read_end, write_end = os.pipe()
        self._write_end: int | None = write_end
        try:
            fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, MAX_BYTES)
            os.set_blocking(write_end, False)
            self.child = Child(plan, log, env, stdin=read_end, pass_fds=pass_fds)
        except OSError:
            self._close_pipe()
            raise
        finally:
            os.close(read_end)

    @property
    def is_warm(self) -> bool:
        """Whether it can replace a process now."""
        return WARM in self.child.marks and self.child.ended() is None

    def become(self, plan: ProcessPlan, log: Path, environ: Mapping[str, str]) -> Child | None:
        """Send the command line of `plan`; return its new process. If sending fails, kill the spare and return None."""
        order = json.dumps({
            "name": plan.name, "argv": launch_flags(plan), "env": environment(plan, environ), "log": str(log),
        }).encode()  # fmt: skip
        assert self._write_end is not None
        try:
            is_whole = len(order) <= MAX_BYTES and os.write(self._write_end, order) == len(order)
        except OSError:  # it has died, or the pipe is smaller than was requested
            is_whole = False
        if not is_whole:
            self.end()
            return None
        self._close_pipe()
        self.child.become(plan, log)
        return self.child

    def end(self) -> None:
        """Kill it at once: it owns no resources."""
        self._close_pipe()
        send_signal(self.child.record, signal.SIGKILL)
        self.child.reap()

    def _close_pipe(self) -> None:
        """Close it only once: another file may reuse its number."""
        if self._write_end is not None:
            os.close(self._write_end)
            self._write_end = None


class SpareKeeper:
    """Owns the spare of one host: starts it when memory is free and nothing else starts, another once it is used."""

    def __init__(
        self, make: Callable[[], Spare], restarts: Restarts, say: Callable[[str], None], why_none: str = "",
        free_bytes: Callable[[], int] = available_bytes,
    ) -> None:  # fmt: skip
        """`why_none`: why there is never a spare; empty where there may be one."""
        self._start_spare, self._restarts, self._say, self._free_bytes = make, restarts, say, free_bytes
        self._is_disabled, self._why = bool(why_none), why_none or "the cluster is starting"
        self._spare: Spare | None = None
        self._due = 0.0

    @property
    def record(self) -> ProcessRecord:
        """The spare's record; without a spare the pid is 0, and `note` gives the reason."""
        if self._spare is None:
            return ProcessRecord("spare", "spare", 0, 0, "", "", note=self._why)
        return replace(self._spare.child.record, note="warm" if self._spare.is_warm else "warming up")

    def tick(self, now: float, *, is_calm: bool) -> None:
        """Start a spare if there is none; `is_calm`: no process is starting, which a spare would slow down."""
        if self._spare is not None and (end := self._spare.child.ended()) is not None:
            self._on_spare_death(end, now)
        if self._spare is None and not self._is_disabled and is_calm and now >= self._due:
            self._start(now)

    def take(self, plan: ProcessPlan, log: Path, environ: Mapping[str, str]) -> Child | None:
        """Return the spare as the process of `plan`, None where it is not warm or cannot become one."""
        if self._spare is None or not self._spare.is_warm or launch_flags(plan) is None:
            return None
        spare, self._spare, self._why = self._spare, None, "it became " + plan.name
        return spare.become(plan, log, environ)

    def close(self) -> None:
        """Kill the spare; no other is started."""
        self._is_disabled = True
        if self._spare is not None:
            self._spare.end()
            self._spare = None

    def _start(self, now: float) -> None:
        try:
            free = self._free_bytes()
            if free < MIN_FREE_BYTES:
                self._due = now + _POLL_S
                self._why = f"{free / 1e9:.1f} GB of memory are free, but a spare needs {MIN_FREE_BYTES / 1e9:g} GB"
            else:
                self._spare = self._start_spare()
        except OSError as error:
            self._on_spare_death(f"the spare cannot be started: {error}", now)

    def _on_spare_death(self, end: str, now: float) -> None:
        if self._spare is not None:
            self._spare.end()
        self._spare, wait_s = None, self._restarts.died(now)
        self._is_disabled, self._due, self._why = wait_s is None, now + (wait_s or 0.0), end
        self._say(f"{end}; {'no other is started' if wait_s is None else f'another is started in {wait_s:g} s'}")


def why_no_spare(wanted: bool, environ: Mapping[str, str]) -> str:
    """Return the flag or variable that disables the spare on this host; empty if it is enabled."""
    if not wanted:
        return "--no-spare"
    return next((f"{name} is set" for name in _BINDING if environ.get(name)), "")
