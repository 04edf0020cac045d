"""Where the processes of `pdserve up` run: on this machine, or instances on Ray nodes (pdserve/ray_cluster)."""

import os
from collections.abc import Callable, Sequence
from typing import Protocol

from engine.fused.area import NAME as WEIGHTS_NAME
from engine.fused.area import VARIABLE as WEIGHTS_FD
from pdserve.layout import ClusterShape, lay_out
from pdserve.process_plan import ProcessPlan
from pdserve.processes import Child, Watched
from pdserve.restarts import RestartLimits, Restarts
from pdserve.run_folder import ProcessRecord, RunFolder
from pdserve.shared_port import SharedPort
from pdserve.spare import Spare, SpareKeeper, why_no_spare
from pdserve.up_request import UpRequest
from pdserve.variables import STATE_FILE


class Site(Protocol):
    """Starts and stops processes."""

    def plans(self) -> Sequence[ProcessPlan]:
        """Reserve resources and write the tables; return the processes to start. Raises ConfigError, Unavailable."""
        ...

    def spawn(self, plan: ProcessPlan, again: bool) -> Watched:
        """Start a process, for the first time or `again`. Raises OSError."""
        ...

    def tick(self, now: float, *, is_calm: bool) -> None:
        """Do periodic work; `is_calm`: no process is starting."""
        ...

    @property
    def spare(self) -> ProcessRecord | None:
        """Return the record of the warm spare, or one with the reason why there is none; None on Ray."""
        ...

    def close_port(self) -> None:
        """Close the port that schedulers share, if they do: they are about to stop."""
        ...

    def close(self, at_once: Callable[[], bool]) -> Sequence[str]:
        """Stop the processes on other machines, at once if `at_once` returns true; return the names of those killed."""
        ...


class LocalSite:
    """This machine, with one warm spare and one shared memory file of packed weights for all its instances."""

    def __init__(self, request: UpRequest, folder: RunFolder, say: Callable[[str], None]) -> None:
        self._request, self._folder = request, folder
        limits = RestartLimits(max_restarts=request.options.max_restarts, window_s=request.options.restart_window)
        why_none = why_no_spare(request.options.spare, os.environ) if request.worker is None else "--worker"
        if not request.options.prefill:
            why_none = "no instance is started"
        self._port = SharedPort(request)
        self._weights = os.memfd_create(WEIGHTS_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._keeper = SpareKeeper(self._make_spare, Restarts(limits), say, why_none)

    def plans(self) -> Sequence[ProcessPlan]:
        """Choose ports and write the tables."""
        engine, options = self._request.engine, self._request.options
        shape = ClusterShape(
            options.prefill, options.decode, engine.host, engine.port, self._request.flags, engine.device,
            engine.tensor_parallel_size or 1, self._request.worker, self._request.worker_flags, self._request.running,
            self._request.scheduler_ports,
        )  # fmt: skip
        return lay_out(shape, self._folder.tables)

    def spawn(self, plan: ProcessPlan, again: bool) -> Watched:
        """Start a child process; a warm spare, if there is one, takes over for a process that died.

        The spare replaces a scheduler only if there are several.
        """
        log, environ = self._folder.log(plan.name), os.environ | {WEIGHTS_FD: str(self._weights)}
        if plan.role == "scheduler":
            environ = os.environ | {STATE_FILE: str(self._folder.state), **self._port.variables}
        may_take = again and (plan.role != "scheduler" or self._port.is_open)
        spare = self._keeper.take(plan, log, environ) if may_take else None
        inherited = self._port.descriptors if plan.role == "scheduler" else (self._weights,)
        return spare or Child(plan, log, environ, again=again, pass_fds=inherited)

    def tick(self, now: float, *, is_calm: bool) -> None:
        """Start or check the spare."""
        self._keeper.tick(now, is_calm=is_calm)

    @property
    def spare(self) -> ProcessRecord:
        """Return the record of the spare, or one with the reason why there is none."""
        return self._keeper.record

    def close_port(self) -> None:
        """Close the port that schedulers share; the spare has it open too."""
        self._port.close()
        self._keeper.close()

    def close(self, at_once: Callable[[], bool]) -> Sequence[str]:
        """Stop the spare; no process runs on another machine."""
        self._keeper.close()
        if self._weights >= 0:
            os.close(self._weights)
            self._weights = -1
        return ()

    def _make_spare(self) -> Spare:
        environ = os.environ | {**self._port.variables}
        inherited = (self._weights, *self._port.descriptors)
        return Spare(self._request.flags, self._folder.log("spare"), environ, pass_fds=inherited)
