"""The actor that Ray runs on a node for one instance. Its arguments and results are text."""

import os
from typing import Any

from pdserve.ray_cluster.host import NodePlace, RayInstanceHost
from pdserve.ray_cluster.messages import LaunchRequest, NodeRequest, PollRequest, RemoteFailure, decode, encode
from pdserve.ray_cluster.need import RESOURCES
from ranktable_tools.errors import RanktableError
from wire.errors import ConfigError, PdserveError, to_name


class InstanceActor:
    """Hosts one instance on a node. Ray runs its methods on the main thread, which lives as long as the actor does."""

    def __init__(self) -> None:
        import ray

        context: Any = ray.get_runtime_context()
        given = context.get_accelerator_ids()
        ids: dict[str, Any] = {kind: given.get(name, ()) for kind, name in RESOURCES.items()}
        self._host = RayInstanceHost(NodePlace(context.get_node_id(), ray.util.get_node_ip_address(), ids), os.environ)

    def do(self, verb: str, text: str) -> tuple[bool, str]:
        """Return whether the call succeeded, and its result or a RemoteFailure as text: no exception is sent."""
        return answer(self._host, verb, text)


def answer(host: RayInstanceHost, verb: str, text: str) -> tuple[bool, str]:
    """Handle one call: place (with a NodeRequest), start (LaunchRequest), poll (PollRequest), or stop."""
    try:
        return True, _run_verb(host, verb, text)
    except PdserveError as error:
        return False, encode(RemoteFailure(to_name(error), str(error)))
    except RanktableError as error:
        return False, encode(RemoteFailure(ConfigError.__name__, str(error)))
    except Exception as error:  # noqa: BLE001 - a call's outermost frame: the driver reports it
        return False, encode(
            RemoteFailure("Unavailable" if isinstance(error, OSError) else "InternalError", repr(error))
        )


def _run_verb(host: RayInstanceHost, verb: str, text: str) -> str:
    if verb == "place":
        return encode(host.place(decode(NodeRequest, text)))
    if verb == "start":
        host.start(decode(LaunchRequest, text))
        return ""
    if verb == "poll":
        return encode(host.poll(decode(PollRequest, text)))
    return "killed" if host.stop() else "stopped"
