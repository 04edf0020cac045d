"""`pdserve up --ray`: the scheduler here, each instance in an actor on a node of the Ray cluster."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from pdserve import __version__
from pdserve.layout import scheduler_plans
from pdserve.process_plan import ProcessPlan
from pdserve.processes import INSTANCE_GRACE_S, KILL_WAIT_S, POLL_S, Child, Watched
from pdserve.ray_cluster.address import is_loopback, parse_address, split
from pdserve.ray_cluster.messages import LaunchRequest, NodeRequest, Placement
from pdserve.ray_cluster.need import Need, need_of
from pdserve.ray_cluster.placements import Placements
from pdserve.ray_cluster.remote_child import Handle, PendingAnswer, RemoteChild
from pdserve.ray_cluster.session import RaySession
from pdserve.run_folder import RunFolder, open_log
from pdserve.shared_port import SharedPort
from pdserve.up_request import UpRequest
from ranktable_tools.dialects.modelarts import local_text
from ranktable_tools.file_names import local_name
from ranktable_tools.secret import ensure_secret
from ranktable_tools.table_file import read_global
from ranktable_tools.tables import LocalTable, TableDevice, TableServer
from wire.errors import InstanceLost, PdserveError, Unavailable

_STOP_S = INSTANCE_GRACE_S + KILL_WAIT_S


class RayConnection(Protocol):
    """The operations of a Ray session."""

    @property
    def node_ip(self) -> str:
        """Return the address of this machine."""
        ...

    def reserve(
        self, need: Need, num_instances: int, strategy: str, timeout_s: float, say: Callable[[str], None]
    ) -> None:
        """Reserve the resources of all instances at once. Raises Unavailable."""
        ...

    def place(self, index: int) -> Handle:
        """Start placing an instance."""
        ...

    def close(self) -> bool:
        """Release everything; return whether that finished in time."""
        ...


class RaySite:
    """Owns the session with Ray, the instances placed in it, and the table of their placement."""

    def __init__(
        self, request: UpRequest, folder: RunFolder, say: Callable[[str], None],
        join: Callable[[str | None, int], RayConnection] = RaySession,
    ) -> None:  # fmt: skip
        options = request.options
        self._request, self._folder, self._say, self._join = request, folder, say, join
        self._names = [f"prefill-{i}" for i in range(options.prefill)] + [f"decode-{i}" for i in range(options.decode)]
        self._need = need_of(request.engine.device, request.engine.tensor_parallel_size or 1)
        self._environ = dict(os.environ)  # for the scheduler: without the variables set for Ray
        self._port = SharedPort(request)
        self._session: RayConnection | None = None
        self._joined_placements: Placements | None = None
        self._children: dict[str, RemoteChild] = {}

    def plans(self) -> Sequence[ProcessPlan]:
        """Join the cluster, reserve resources and place all instances; return them and the scheduler."""
        request, options = self._request, self._request.options
        address = None if options.address is None else parse_address(options.address)
        self._print_address(address)
        self._session = session = self._join(address, self._num_cpus())
        session.reserve(self._need, len(self._names), options.ray_strategy, request.startup_timeout_s, self._say)
        self._joined_placements = placements = Placements(self._names, session.node_ip, self._folder.tables)
        ensure_secret(self._folder.tables)
        plans = [ProcessPlan(name, name.partition("-")[0], "", (), {}) for name in self._names]
        for plan in plans:
            self._begin(plan, again=False)
        self._wait_placed()
        read_global(str(placements.path))  # report an invalid table once, here
        return (*plans, *self._scheduler_plans(placements))

    def spawn(self, plan: ProcessPlan, again: bool) -> Watched:
        """Start the scheduler here; restart an instance on its node, or on another one if that is lost."""
        if plan.role == "scheduler":
            environ = {**self._environ, **self._port.variables}
            log = self._folder.log(plan.name)
            return Child(plan, log, environ, again=again, pass_fds=self._port.descriptors)
        return self._begin(plan, again=True) if again else self._children[plan.name]

    def tick(self, now: float, *, is_calm: bool) -> None:
        """Do nothing: there is no spare on Ray's nodes."""

    @property
    def spare(self) -> None:
        """Return None."""
        return None

    def close_port(self) -> None:
        """Close the port that schedulers share."""
        self._port.close()

    def close(self, at_once: Callable[[], bool]) -> Sequence[str]:
        """Stop the instances, SIGTERM first, and leave the Ray cluster."""
        if self._session is None:
            return ()
        try:
            return self._stop_instances(at_once)
        finally:
            if not self._session.close():
                self._say("Ray does not respond: not waiting for it; the instances end with this process")

    def set_entry(self, name: str, placement: Placement) -> None:
        """Enter an instance into the table, and write the table if it changed."""
        placements = self._get_placements()
        placements.set_entry(name, _server(placement))
        node, devices = f"{placement.ip} (node {placement.node_id[:12]})", self._devices(placement)
        self._say(f"{name} is placed on {node}, {devices}, port {placement.port}")
        digest = placements.write()
        if digest is not None:
            self._say(f"wrote {placements.path}, digest {digest}")

    def launch_request(self, name: str, placement: Placement) -> LaunchRequest | None:
        """Return what an instance runs, None while the table is incomplete."""
        placements = self._get_placements()
        if placements.table() is None:
            return None
        return LaunchRequest(
            name=name, role=name.partition("-")[0], flags=self._request.flags, global_name=placements.path.name,
            global_table=placements.text, local_name=local_name(placement.ip, placement.device_ids),
            local_table=local_text(LocalTable(_server(placement))),
            secret=ensure_secret(self._folder.tables)[0].read_text(), folder=os.getcwd(),
        )  # fmt: skip

    def table(self) -> str:
        """Return the text of the global table in use."""
        return self._get_placements().text

    def _get_placements(self) -> Placements:
        assert self._joined_placements is not None, "the cluster was joined"
        return self._joined_placements

    def _begin(self, plan: ProcessPlan, *, again: bool) -> RemoteChild:
        """Begin one start of an instance, on its existing actor if that lives."""
        assert self._session is not None, "the cluster was joined"
        log, before = self._log(plan.name, again=again), self._children.get(plan.name)
        place_s, index = self._request.startup_timeout_s, self._names.index(plan.name)
        if before is not None and not before.is_lost:
            child = RemoteChild(plan, before.handle, self, log, place_s=place_s, offset=before.offset)
        else:
            if before is not None:
                before.handle.kill()
                self._get_placements().lose(plan.name)
            child = RemoteChild(plan, self._session.place(index), self, log, place_s=place_s)
        first = index * self._need.num_ranks
        ids = tuple(str(first + rank) for rank in range(self._need.num_ranks))
        child.request_placement(NodeRequest(self._need.kind, ids, __version__))
        self._children[plan.name] = child
        return child

    def _wait_placed(self) -> None:
        """Wait until every instance is placed. Raises Unavailable if one is lost or not placed in time."""
        while any(child.placement is None for child in self._children.values()):
            for child in self._children.values():
                end = child.ended() if child.placement is None else None
                if end is not None:
                    raise Unavailable(end)
            time.sleep(POLL_S / 2)

    def _stop_instances(self, at_once: Callable[[], bool]) -> Sequence[str]:
        pending_stops: dict[str, PendingAnswer] = {
            name: child.handle.call("stop", "") for name, child in self._children.items() if not child.is_lost
        }
        killed, deadline = set(pending_stops), time.monotonic() + _STOP_S
        while pending_stops and time.monotonic() < deadline and not at_once():
            for name, answer in [(name, _poll_stop(pending)) for name, pending in pending_stops.items()]:
                if answer is not None:
                    del pending_stops[name]
                if answer == "stopped":
                    killed.discard(name)
            time.sleep(POLL_S / 2)
        return sorted(killed)

    def _scheduler_plans(self, placements: Placements) -> Sequence[ProcessPlan]:
        request = self._request
        files = {
            "GLOBAL_RANK_TABLE_FILE_PATH": str(placements.path),
            "RANK_TABLE_FILE_PATH": str(placements.scheduler_path),
        }
        return scheduler_plans(request.engine.host, request.scheduler_ports, request.flags, files)

    def _num_cpus(self) -> int:
        return len(self._names) * self._need.num_ranks if self._need.resource == "CPU" else 0

    def _devices(self, placement: Placement) -> str:
        return f"{self._need.resource} {','.join(placement.device_ids)}"

    def _print_address(self, address: str | None) -> None:
        if address is None:
            self._say("starting Ray on this machine, on 127.0.0.1 only")
        elif ":" in address and is_loopback(split(address)[0]):
            self._say(f"joining the Ray cluster at {address}")
        else:
            self._say(
                f"joining the Ray cluster at {address}; anyone who can reach Ray's ports there can run any program as "
                "Ray's user, unless Ray requires a token: docs/ray.md"
            )

    def _log(self, name: str, *, again: bool) -> Path:
        """Return the path of the instance's log; the last run's log is kept beside it."""
        log = self._folder.log(name)
        open_log(log, anew=not again).close()
        return log


def _server(placement: Placement) -> TableServer:
    pairs = enumerate(zip(placement.device_ids, placement.device_ips, strict=True))
    devices = tuple(TableDevice(device_id, device_ip, str(rank)) for rank, (device_id, device_ip) in pairs)
    return TableServer(placement.ip, placement.ip, devices, placement.port)


def _poll_stop(pending: PendingAnswer) -> str | None:
    try:
        return pending.poll()
    except InstanceLost:
        return "stopped"  # gone already
    except PdserveError:
        return "killed"
