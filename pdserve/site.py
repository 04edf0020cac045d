"""Where the processes of `pdserve up` run: here, or (pdserve/ray_cluster) the instances on the nodes of Ray."""

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
from pdserve.spare import Spare, SpareKeeper, why_no_spare
from pdserve.up_request import UpRequest
from pdserve.variables import STATE_FILE


class Site(Protocol):
    """Where processes are started and ended."""

    def plans(self) -> Sequence[ProcessPlan]:
        """Make room and the tables; return the processes to start. Raises ConfigError, Unavailable."""
        ...

    def spawn(self, plan: ProcessPlan, again: bool) -> Watched:
        """Start one, anew or again. Raises OSError."""
        ...

    def tick(self, now: float, *, is_calm: bool) -> None:
        """Do what is due beside the processes; `is_calm`: none of them is starting."""
        ...

    @property
    def spare(self) -> ProcessRecord | None:
        """Return what names the warm spare, or says why there is none; None where the site has no such thing."""
        ...

    def close(self, at_once: Callable[[], bool]) -> Sequence[str]:
        """End what runs on other machines, in order until `at_once` says so; return the names of those killed."""
        ...


class LocalSite:
    """This machine, with one warm spare for all its instances, and one memory for their packed weights."""

    def __init__(self, request: UpRequest, folder: RunFolder, say: Callable[[str], None]) -> None:
        self._request, self._folder = request, folder
        limits = RestartLimits(most=request.options.max_restarts, window_s=request.options.restart_window)
        why_none = why_no_spare(request.options.spare, os.environ)
        self._weights = os.memfd_create(WEIGHTS_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._keeper = SpareKeeper(self._make_spare, Restarts(limits), say, why_none)

    def plans(self) -> Sequence[ProcessPlan]:
        """Lay out tables and ports."""
        engine, options = self._request.engine, self._request.options
        shape = ClusterShape(
            options.prefill, options.decode, engine.host, engine.port, self._request.flags, engine.device,
            engine.tensor_parallel_size or 1,
        )  # fmt: skip
        return lay_out(shape, self._folder.tables)

    def spawn(self, plan: ProcessPlan, again: bool) -> Watched:
        """Start a child of ours; an instance that died is the spare from now on, where there is a warm one."""
        log, environ = self._folder.log(plan.name), os.environ | {WEIGHTS_FD: str(self._weights)}
        if plan.role == "scheduler":
            return Child(plan, log, os.environ | {STATE_FILE: str(self._folder.state)}, again=again)
        spare = self._keeper.take(plan, log, environ) if again else None
        return spare or Child(plan, log, environ, again=again, pass_fds=(self._weights,))

    def tick(self, now: float, *, is_calm: bool) -> None:
        """Look after the spare."""
        self._keeper.tick(now, is_calm=is_calm)

    @property
    def spare(self) -> ProcessRecord:
        """Return what names the spare, or says why there is none."""
        return self._keeper.record

    def close(self, at_once: Callable[[], bool]) -> Sequence[str]:
        """End the spare; nothing is elsewhere."""
        self._keeper.close()
        if self._weights >= 0:
            os.close(self._weights)
            self._weights = -1
        return ()

    def _make_spare(self) -> Spare:
        return Spare(self._request.flags, self._folder.log("spare"), os.environ, pass_fds=(self._weights,))
