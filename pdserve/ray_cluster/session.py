"""The session with a Ray cluster: one placement group with an actor in each bundle."""

import atexit
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pdserve.ray_cluster.actor import InstanceActor
from pdserve.ray_cluster.join import check_reachable, load
from pdserve.ray_cluster.messages import RemoteFailure, decode
from pdserve.ray_cluster.need import Need, no_room
from pdserve.ray_cluster.own_ray import OwnRay
from wire.errors import ConfigError, InstanceLost, Unavailable, from_name

_ROOM_POLL_S = 1.0
_GET_S = 5.0
_LEAVE_S = 15.0
_MAX_CHARS = 400
_ID_LINE = re.compile(r"\s*(class_name|actor_id|pid|namespace|ip): ")


class RaySession:
    """Owns the connection, the placement group and the actors; `close` releases them all."""

    def __init__(self, address: str | None, num_cpus: int) -> None:
        """Connect to the cluster at `address`, or start one here. Raises ConfigError, Unavailable."""
        self._own = None if address is not None else OwnRay()
        self._handles: list[RayHandle] = []
        self._group: Any = None
        self._need: Need | None = None
        try:
            if self._own is not None:
                self._own.prepare(os.environ)
                arguments = self._own.arguments(num_cpus)
            else:
                assert address is not None, "without an address _own is set"
                check_reachable(address)
                arguments = {"address": address}
            self._ray = load()
            _connect(self._ray, arguments)
        except BaseException:  # Ctrl-C too: stop what Ray has started so far
            if "ray" in sys.modules:
                sys.modules["ray"].shutdown()
            self._forget_folder()
            raise

    @property
    def node_ip(self) -> str:
        """The address of this machine in the Ray cluster."""
        return str(self._ray.util.get_node_ip_address())

    def reserve(
        self, need: Need, num_instances: int, strategy: str, timeout_s: float, say: Callable[[str], None]
    ) -> None:
        """Reserve all resources at once. Raises Unavailable, listing the nodes' resources, after `timeout_s`."""
        from ray.util.placement_group import placement_group

        self._need = need
        ray_strategy = strategy.upper().replace("-", "_")
        self._group = placement_group([need.bundle] * num_instances, strategy=ray_strategy)
        deadline, has_printed = time.monotonic() + timeout_s, False
        while not self._group.wait(_ROOM_POLL_S):
            if time.monotonic() > deadline:
                nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
                raise Unavailable(no_room(need, num_instances, strategy, nodes, timeout_s))
            if not has_printed:
                say(f"waiting: the Ray cluster has no room yet for {num_instances} instances of {need} each")
            has_printed = True

    def place(self, index: int) -> "RayHandle":
        """Start the actor of one instance in its bundle; it runs once Ray has placed the bundle on a node."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        assert self._need is not None, "reserved"
        need = self._need
        resources: dict[str, Any] = {"num_cpus": need.num_ranks if need.resource == "CPU" else 0}
        if need.resource == "GPU":
            resources["num_gpus"] = need.num_ranks
        elif need.resource != "CPU":
            resources["resources"] = {need.resource: need.num_ranks}
        actor = self._ray.remote(InstanceActor).options(
            **resources, max_restarts=0, max_task_retries=0, max_concurrency=1,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
        )  # fmt: skip
        handle = RayHandle(self._ray, actor.remote())
        self._handles.append(handle)
        return handle

    def close(self) -> bool:
        """Kill the actors, disconnect, and stop the Ray we started; return whether that finished in time.

        If the head node is gone, disconnecting never returns: this process then exits without Ray's exit handlers.
        """
        leaving = threading.Thread(target=self._disconnect, name="leave-ray", daemon=True)
        leaving.start()
        leaving.join(_LEAVE_S)
        if leaving.is_alive():
            atexit.register(os._exit, 1)
        self._forget_folder()
        return not leaving.is_alive()

    def _disconnect(self) -> None:
        for handle in self._handles:
            handle.kill()
        self._ray.shutdown()  # the placement group ends with the session

    def _forget_folder(self) -> None:
        if self._own is not None:
            self._own.close()


class RayHandle:
    """Handle of one actor."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor

    def call(self, verb: str, text: str) -> "RayPending":
        """Send a call; Ray queues it until the actor is placed."""
        return RayPending(self._ray, self._actor.do.remote(verb, text))

    def kill(self) -> None:
        """Kill the actor; no error if it is gone."""
        _ignore_gone(self._ray, lambda: self._ray.kill(self._actor))


class RayPending:
    """The pending reply to one call."""

    def __init__(self, ray: Any, reference: Any) -> None:
        self._ray, self._reference = ray, reference

    def poll(self) -> str | None:
        """Return the reply, None while it is pending. Raises InstanceLost, and the node's error."""
        ready, _ = self._ray.wait([self._reference], timeout=0)
        if not ready:
            return None
        try:
            done, text = self._ray.get(self._reference, timeout=_GET_S)
        except self._ray.exceptions.RayError as error:
            raise InstanceLost(_one_line(error)) from error
        if done:
            return str(text)
        failure = decode(RemoteFailure, text)
        raise from_name(failure.error, failure.message)


def _connect(ray: Any, arguments: dict[str, Any]) -> None:
    with _signals_kept():
        try:
            ray.init(log_to_driver=False, logging_level="ERROR", **arguments)
        except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError, AssertionError, OSError) as error:
            raise ConfigError(f"cannot connect to the Ray cluster: {_one_line(error)}") from error


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Restore the signal handlers afterwards: Ray replaces the one of SIGTERM."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _ignore_gone(ray: Any, do: Callable[[], Any]) -> None:
    """Call `do`, ignoring errors for a resource that is gone."""
    try:
        do()
    except (ray.exceptions.RayError, ValueError, RuntimeError):
        return


def _one_line(error: BaseException) -> str:
    """Return a Ray error's message in one line, without the ids that it lists."""
    lines = (line for line in str(error).splitlines() if not _ID_LINE.match(line))
    message = " ".join(" ".join(lines).split()) or repr(error)
    return message if len(message) <= _MAX_CHARS else message[: _MAX_CHARS - 3] + "..."
