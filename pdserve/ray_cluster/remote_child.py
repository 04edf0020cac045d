"""The driver's view of one instance, from its placement to its end. It polls and never blocks.

placing ---> waiting (the table lacks others) ---> starting ---> running ---> ended
   `-------------`------------------------------------`-------------`--> lost: the node, the actor or its replies
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from pdserve.process_plan import ProcessPlan
from pdserve.processes import describe_status
from pdserve.ray_cluster.messages import LaunchRequest, NodeRequest, Placement, PollReply, PollRequest, decode, encode
from pdserve.run_folder import ProcessRecord, last_line, open_log
from ranktable_tools.errors import RanktableError
from telemetry.start_marks import Mark
from wire.errors import ConfigError, DeadlineExceeded, Incompatible, PdserveError

POLL_EVERY_S = 0.5
ANSWER_S = 30.0
_WRONG_INPUT = 2


class PendingAnswer(Protocol):
    """A pending reply."""

    def poll(self) -> str | None:
        """Return the reply, None while it is pending. Raises InstanceLost if none can come, else the node's error."""
        ...


class Handle(Protocol):
    """An actor that hosts one instance on a node, placed or still waiting for room."""

    def call(self, verb: str, text: str) -> PendingAnswer:
        """Send a request; the actor handles one at a time."""
        ...

    def kill(self) -> None:
        """Kill the actor and its process."""
        ...


class ClusterTable(Protocol):
    """The table operations that an instance needs."""

    def set_entry(self, name: str, placement: Placement) -> None:
        """Enter the instance into the table. Raises ConfigError."""
        ...

    def launch_request(self, name: str, placement: Placement) -> LaunchRequest | None:
        """Return what to run on the node, None while the table is incomplete."""
        ...

    def table(self) -> str:
        """Return the text of the current global table."""
        ...


class RemoteChild:
    """Owns one start of an instance. `handle` outlives this object if only the process died."""

    def __init__(
        self, plan: ProcessPlan, handle: Handle, cluster_table: ClusterTable, log: Path, *, place_s: float,
        offset: int = 0, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.handle = handle
        self.placement: Placement | None = None
        self.is_lost = False
        self.offset = offset
        self.exit_status: int | None = None
        self._plan, self._cluster_table, self._log, self._place_s, self._clock = (
            plan,
            cluster_table,
            log,
            place_s,
            clock,
        )
        self._end: str | None = None
        self._table = ""  # the table that its node has
        self._pending: PendingAnswer | None = None
        self._verb, self._due, self._next = "", 0.0, 0.0
        self._stage = self._wait_for_placement

    def request_placement(self, wanted: NodeRequest) -> None:
        """Request a placement, which is known once Ray has room for the actor."""
        self._call("place", encode(wanted), self._place_s)

    @property
    def record(self) -> ProcessRecord:
        """The record; its pid is 0, since the process's own pid belongs to another machine."""
        address = "" if self.placement is None else f"{self.placement.ip}:{self.placement.port}"
        return ProcessRecord(self._plan.name, self._plan.role, 0, 0, address, str(self._log))

    @property
    def marks(self) -> Mapping[str, Mark]:
        """Return no marks: the node does not send them."""
        return {}

    def ended(self) -> str | None:
        """Poll once; return how it ended, None while it runs."""
        if self._end is None:
            try:
                self._stage()
            except (PdserveError, RanktableError) as error:
                self._mark_lost(error)
        return self._end

    def _mark_lost(self, error: PdserveError | RanktableError) -> None:
        where = "" if self.placement is None else f" on {self.placement.ip} (node {self.placement.node_id[:12]})"
        self.is_lost = True
        self.exit_status = _WRONG_INPUT if isinstance(error, ConfigError | Incompatible) else None
        self._end = f"{self._plan.name}{where} is lost: {error} (log: {self._log})"

    def _wait_for_placement(self) -> None:
        answer = self._answer()
        if answer is not None:
            self.placement = decode(Placement, answer)
            self._cluster_table.set_entry(self._plan.name, self.placement)
            self._due = self._clock() + self._place_s
            self._stage = self._wait_for_table

    def _wait_for_table(self) -> None:
        assert self.placement is not None
        launch_request = self._cluster_table.launch_request(self._plan.name, self.placement)
        if launch_request is not None:
            self._table = launch_request.global_table
            self._call("start", encode(launch_request), ANSWER_S)
            self._stage = self._start
        elif self._clock() > self._due:
            raise DeadlineExceeded(f"the other role had no instance within {self._place_s:g} s")

    def _start(self) -> None:
        if self._answer() is not None:
            self._stage = self._run

    def _run(self) -> None:
        if self._pending is None:
            if self._clock() >= self._next:
                table = self._cluster_table.table()
                self._call("poll", encode(PollRequest(self.offset, None if table == self._table else table)), ANSWER_S)
                self._table = table
            return
        answer = self._answer()
        if answer is None:
            return
        reply = decode(PollReply, answer)
        self.offset = reply.offset
        with suppress(OSError), open_log(self._log) as file:  # a full disk loses the log only
            file.write(reply.log.encode())
        self._next = self._clock() + (0.0 if reply.more else POLL_EVERY_S)
        if reply.exit_status is not None and not reply.more:
            self.exit_status = reply.exit_status
            status = describe_status(reply.exit_status)
            self._end = f"{self._plan.name} ended with {status}: {last_line(self._log)} (log: {self._log})"

    def _call(self, verb: str, text: str, limit_s: float) -> None:
        self._pending, self._verb = self.handle.call(verb, text), verb
        self._due = self._clock() + limit_s

    def _answer(self) -> str | None:
        """Return the reply to the last request, None while it is pending. Raises DeadlineExceeded, InstanceLost."""
        assert self._pending is not None, "a request was sent"
        answer = self._pending.poll()
        if answer is not None:
            self._pending = None
        elif self._clock() > self._due:
            what = "no node had room" if self._verb == "place" else f"no reply to {self._verb!r}"
            limit_s = self._place_s if self._verb == "place" else ANSWER_S
            raise DeadlineExceeded(f"{what} within {limit_s:g} s")
        return answer
