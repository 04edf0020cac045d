"""Tables of every dialect as documents, built from plain dictionaries alone: no code of the product writes them."""

from collections.abc import Callable, Sequence
from typing import Any

Document = dict[str, Any]

# Documentation networks: never this machine's own.
A, B, C = "192.0.2.1", "192.0.2.2", "192.0.2.3"


def device(device_id: str, device_ip: str | None, rank: int, **more: str) -> Document:
    """One device entry."""
    address = {} if device_ip is None else {"device_ip": device_ip}
    return {"device_id": device_id, **address, "rank_id": str(rank), **more}


def server(ip: str, *device_ids: int, first_rank: int = 0, **more: object) -> Document:
    """One server entry of the guide's form; device N of host 192.0.2.H has the address 198.51.100.(10 H + N)."""
    entry: Document = {"server_id": ip, "server_ip": ip, **more}
    host = int(ip.rsplit(".", 1)[1]) if ip.startswith("192.0.2.") else 9
    devices = [
        device(str(device_id), f"198.51.100.{10 * host + device_id}", first_rank + position)
        for position, device_id in enumerate(device_ids)
    ]
    return {**entry, "device": devices} if devices else entry


def group(group_id: int, *servers: Document, **more: object) -> Document:
    """One group of servers."""
    return {"group_id": str(group_id), "server_count": str(len(servers)), "server_list": list(servers), **more}


def grouped(*groups: Document, version: str = "1.0") -> Document:
    """A table of groups."""
    return {"version": version, "status": "completed", "server_group_list": list(groups)}


def modelarts(prefill: Sequence[Document] = (), decode: Sequence[Document] = ()) -> Document:
    """The guide's global table; two instances of two devices on two hosts where nothing is given."""
    return grouped(
        group(0, server(A)), group(1, *(prefill or [server(A, 4, 5)])), group(2, *(decode or [server(B, 6, 7)]))
    )


def local(*servers: Document) -> Document:
    """The guide's local table."""
    return {"version": "1.0", "status": "completed", **group(0, *(servers or [server(B, 6, 7)]))}


def kubeinfer() -> Document:
    """Two prefill instances, the second over two hosts, and a decode instance."""
    spread = [server(B, 0, 1, pod_name="p-1-0"), server(C, 0, 1, first_rank=2, pod_name="p-1-1")]
    return grouped(
        group(0, server(A, pod_name="proxy-0")), group(1, server(A, 0, 1)), group(2, *spread), group(3, server(A, 2, 3))
    )


def omni_merged() -> Document:
    """One prefill and two decode instances; merge-all writes the counts as integers."""
    table = grouped(group(0, server(A, 0, 1)), group(1, server(A, 2, 3)), group(2, server(B, 0, 1)))
    for listed in table["server_group_list"]:
        listed["server_count"] = int(listed["server_count"])
    return table


def mindie() -> Document:
    """Two coordinators, a controller, an instance over two hosts of a super pod, and a job of two instances."""
    spread = [
        server(A, 0, 1, first_rank=0),
        server(B, 0, 1, first_rank=2),
    ]
    singles = [server(C, 0, 1, 2, 3), server("192.0.2.4", 0, 1, 2, 3)]
    for number, entry in enumerate((*spread, *singles)):
        for position, listed in enumerate(entry["device"]):
            listed.update(device_logical_id=str(position), super_device_id=str(1000 * number + position))
    return grouped(
        group(0, server(A), server(B)),
        group(1, server(C)),
        group(2, *spread, deploy_server="0", super_pod_list=[pod("0", A, B)]),
        group(3, *singles, deploy_server="1", super_pod_list=[pod("0", C), pod("1", "192.0.2.4")]),
    )


def pod(pod_id: str, *server_ids: str) -> Document:
    """One super pod."""
    return {"super_pod_id": pod_id, "server_list": [{"server_id": server_id} for server_id in server_ids]}


def vllm_ascend() -> Document:
    """Two prefill devices of one host, and two decode devices of two hosts."""
    rows = {"prefill": [(A, "0"), (A, "1")], "decode": [(B, "0"), (C, "0")]}
    lists = {
        f"{role}_device_list": [
            {"server_id": ip, "device_id": device_id, "device_ip": f"198.51.100.{10 * int(ip[-1]) + int(device_id)}"}
            for ip, device_id in listed
        ]
        for role, listed in rows.items()
    }
    for number, entry in enumerate((*lists["prefill_device_list"], *lists["decode_device_list"])):
        entry.update(super_pod_id="0", super_device_id=str(106758159 + number), cluster_id=str(number + 1))
    return {"version": "1.2", "server_count": "3", **lists, "status": "completed"}


def hccl(*servers: Document) -> Document:
    """HCCL's table, version 1.0: one communicator, ranks over all servers, no server_ip."""
    listed = [dict(entry) for entry in servers or (server(A, 0, 1), server(B, 0, 1, first_rank=2))]
    for entry in listed:
        del entry["server_ip"]
    return {"status": "completed", "version": "1.0", "server_count": str(len(listed)), "server_list": listed}


def hccl_1_2() -> Document:
    """HCCL's table with super pods, as MindCluster's hccl.json has it."""
    table = {**hccl(), "version": "1.2", "super_pod_list": [pod("1", A, B)]}
    for number, entry in enumerate(table["server_list"]):
        entry.update(host_ip=entry["server_id"], container_ip=f"203.0.113.{number + 1}")
        for position, listed in enumerate(entry["device"]):
            listed["super_device_id"] = str(113246208 + 16 * number + position)
    return table


SAMPLES: dict[str, Callable[[], Document]] = {
    "modelarts": modelarts,
    "hccl-1.0": hccl,
    "hccl-1.2": hccl_1_2,
    "kubeinfer": kubeinfer,
    "omni-merged": omni_merged,
    "mindie": mindie,
    "vllm-ascend": vllm_ascend,
}
