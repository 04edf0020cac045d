"""Our session with a Ray cluster: one placement group, an actor for each of its bundles."""

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
_MOST_CHARS = 400
_ID_LINE = re.compile(r"\s*(class_name|actor_id|pid|namespace|ip): ")


class RaySession:
    """Owns the connection, the placement group and the actors; `close` gives all of it back."""

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
                assert address is not None, "it has one or the other"
                check_reachable(address)
                arguments = {"address": address}
            self._ray = load()
            _connect(self._ray, arguments)
        except BaseException:  # Ctrl-C too: what Ray started so far is ended
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
        """Take the room for all instances at once. Raises Unavailable, with what is there, after `timeout_s`."""
        from ray.util.placement_group import placement_group

        self._need = need
        ray_strategy = strategy.upper().replace("-", "_")
        self._group = placement_group([need.bundle] * num_instances, strategy=ray_strategy)
        deadline, told = time.monotonic() + timeout_s, False
        while not self._group.wait(_ROOM_POLL_S):
            if time.monotonic() > deadline:
                nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
                raise Unavailable(no_room(need, num_instances, strategy, nodes, timeout_s))
            if not told:
                say(f"waiting: the Ray cluster has no room yet for {num_instances} instances of {need} each")
            told = True

    def place(self, index: int) -> "RayHandle":
        """Start the actor of one instance in its bundle; it is there as soon as Ray has the bundle on a node."""
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
        """End the actors, leave, and end the Ray we started; return whether Ray took it in time.

        Where its head is gone it would take it never: then this process ends without Ray's own farewell.
        """
        leaving = threading.Thread(target=self._leave, name="leave-ray", daemon=True)
        leaving.start()
        leaving.join(_LEAVE_S)
        if leaving.is_alive():
            atexit.register(os._exit, 1)
        self._forget_folder()
        return not leaving.is_alive()

    def _leave(self) -> None:
        for handle in self._handles:
            handle.kill()
        self._ray.shutdown()  # the placement group ends with us

    def _forget_folder(self) -> None:
        if self._own is not None:
            self._own.close()


class RayHandle:
    """One actor."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor

    def ask(self, verb: str, text: str) -> "RayPending":
        """Send a call; it waits in Ray until the actor has a place."""
        return RayPending(self._ray, self._actor.do.remote(verb, text))

    def kill(self) -> None:
        """End it at once; one that is gone is fine."""
        _quietly(self._ray, lambda: self._ray.kill(self._actor))


class RayPending:
    """The answer to one call."""

    def __init__(self, ray: Any, reference: Any) -> None:
        self._ray, self._reference = ray, reference

    def poll(self) -> str | None:
        """Return the answer, None while there is none. Raises InstanceLost, and what the node says went wrong."""
        ready, _ = self._ray.wait([self._reference], timeout=0)
        if not ready:
            return None
        try:
            done, text = self._ray.get(self._reference, timeout=_GET_S)
        except self._ray.exceptions.RayError as error:
            raise InstanceLost(_words(error)) from error
        if done:
            return str(text)
        failure = decode(RemoteFailure, text)
        raise from_name(failure.error, failure.words)


def _connect(ray: Any, arguments: dict[str, Any]) -> None:
    with _signals_kept():
        try:
            ray.init(log_to_driver=False, logging_level="ERROR", **arguments)
        except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError, AssertionError, OSError) as error:
            raise ConfigError(f"no session with the Ray cluster: {_words(error)}") from error


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray takes SIGTERM for itself."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _quietly(ray: Any, do: Callable[[], Any]) -> None:
    """Give back what may be gone already."""
    try:
        do()
    except (ray.exceptions.RayError, ValueError, RuntimeError):
        return


def _words(error: BaseException) -> str:
    """Return what an error of Ray says in one line, without the ids that it lists."""
    lines = (line for line in str(error).splitlines() if not _ID_LINE.match(line))
    words = " ".join(" ".join(lines).split()) or repr(error)
    return words if len(words) <= _MOST_CHARS else words[: _MOST_CHARS - 3] + "..."
