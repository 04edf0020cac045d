"""Read and write `super_pod_list`: which servers share a super pod (Atlas A3)."""

from collections.abc import Iterable
from dataclasses import replace

from ranktable_tools.document import Node
from ranktable_tools.fields import identity
from ranktable_tools.reading import LocatedServer
from ranktable_tools.tables import TableServer


def read_super_pods(node: Node, servers: list[LocatedServer]) -> list[LocatedServer]:
    """Return the servers with their super pods from the list; each server must be in exactly one."""
    pod_by_server: dict[str, str] = {}
    known = {located.server.server_id for located in servers}
    # A server that could not be read is missing from `known`: entries that refer to it are not reported.
    above = f"{node.json_path}.server_list".lstrip(".")
    has_all = not any(problem.json_path.startswith(above) for problem in node.problems)
    for pod in node.elements("super_pod_list") or []:
        pod_id = pod.text("super_pod_id", identity)
        for member in pod.elements("server_list") or []:
            server_id = member.text("server_id", identity)
            if server_id is None or pod_id is None:
                continue
            if server_id not in known and not has_all:
                continue
            if server_id not in known:
                unknown = Node(server_id, f"{member.json_path}.server_id", member.problems)
                unknown.refuse("super-pod-server", "must be the server_id of a server above")
            elif server_id in pod_by_server:
                other = pod_by_server[server_id]
                member.report("super-pod-twice", f'is server "{server_id}", in super pod {other} too', "keep it in one")
            pod_by_server.setdefault(server_id, pod_id)
    return [_with_pod(located, pod_by_server.get(located.server.server_id), node) for located in servers]


def super_pod_list(servers: Iterable[TableServer]) -> list[dict[str, object]]:
    """Return `super_pod_list` for these servers, in their order."""
    members: dict[str, list[dict[str, str]]] = {}
    for server in servers:
        if server.super_pod_id is not None:
            members.setdefault(server.super_pod_id, []).append({"server_id": server.server_id})
    return [{"super_pod_id": pod_id, "server_list": listed} for pod_id, listed in members.items()]


def _with_pod(located: LocatedServer, pod_id: str | None, node: Node) -> LocatedServer:
    if pod_id is None:
        missing = Node(located.server.server_id, f"{located.json_path}.server_id", node.problems)
        missing.refuse("super-pod-missing", "must be in super_pod_list too")
        return located
    return replace(located, server=replace(located.server, super_pod_id=pod_id))
