"""Where the processes of `pdserve up` run: here, or (pdserve/ray_cluster) the instances on the nodes of Ray."""

import os
from collections.abc import Callable, Sequence
from typing import Protocol

from pdserve.layout import ClusterShape, lay_out
from pdserve.process_plan import ProcessPlan
from pdserve.processes import Child, Watched
from pdserve.run_folder import RunFolder
from pdserve.up_request import UpRequest


class Site(Protocol):
    """Where processes are started and ended."""

    def plans(self) -> Sequence[ProcessPlan]:
        """Make room and the tables; return the processes to start. Raises ConfigError, Unavailable."""
        ...

    def spawn(self, plan: ProcessPlan, again: bool) -> Watched:
        """Start one, anew or again. Raises OSError."""
        ...

    def close(self, at_once: Callable[[], bool]) -> Sequence[str]:
        """End what runs on other machines, in order until `at_once` says so; return the names of those killed."""
        ...


class LocalSite:
    """This machine."""

    def __init__(self, request: UpRequest, folder: RunFolder) -> None:
        self._request, self._folder = request, folder

    def plans(self) -> Sequence[ProcessPlan]:
        """Lay out tables and ports."""
        engine, options = self._request.engine, self._request.options
        shape = ClusterShape(
            options.prefill, options.decode, engine.host, engine.port, self._request.flags, engine.device,
            engine.tensor_parallel_size or 1,
        )  # fmt: skip
        return lay_out(shape, self._folder.tables)

    def spawn(self, plan: ProcessPlan, again: bool) -> Watched:
        """Start a child of ours."""
        return Child(plan, self._folder.log(plan.name), os.environ, again=again)

    def close(self, at_once: Callable[[], bool]) -> Sequence[str]:
        """Nothing is elsewhere."""
        return ()
