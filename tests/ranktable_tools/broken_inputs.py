"""Every broken table we know, as data: what is broken, the rule that finds it, the files, and the command line."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from tests.docs.broken_input import Broken
from tests.ranktable_tools.documents import (
    A,
    B,
    C,
    Document,
    group,
    grouped,
    hccl,
    hccl_1_2,
    kubeinfer,
    local,
    mindie,
    modelarts,
    pod,
    server,
    vllm_ascend,
)

LINT = ("lint", "t.json")


def with_value(document: Document, path: str, value: object) -> Document:
    """Set what stands at a path like `server_group_list.1.group_id`; `...` takes it out."""
    changed = copy.deepcopy(document)
    *parents, last = (int(key) if key.isdigit() else key for key in path.split("."))
    holder: Any = changed
    for key in parents:
        holder = holder[key]
    if value is ...:
        del holder[last]
    else:
        holder[last] = value
    return changed


def _lint(what: str, rule: str, document: Document | list[object] | str, *flags: str) -> Broken:
    return Broken(what, rule, {"t.json": document}, (*LINT, *flags))


def _changed(base: Callable[[], Document]) -> Callable[..., Broken]:
    def row(what: str, rule: str, path: str, value: object, *flags: str) -> Broken:
        return _lint(what, rule, with_value(base(), path, value), *flags)

    return row


_guide, _hccl, _pods = _changed(modelarts), _changed(hccl), _changed(hccl_1_2)
_mindie, _vllm = _changed(mindie), _changed(vllm_ascend)
_G1 = "server_group_list.1.server_list.0"
_G2 = "server_group_list.2.server_list.0"
_ONE_HOST = modelarts(prefill=[server(A, 0)], decode=[server(A, 1)])
_LOOPBACK = with_value(modelarts(), "server_group_list.0.server_list.0.server_ip", "localhost")

FILES = (
    Broken("the file is not there", "unreadable", {}, ("lint", "gone.json")),
    Broken("no name, as a variable that is not set gives it", "unreadable", {}, ("lint", "")),
    _lint("the file is cut off", "not-json", '{"version": "1.0", "server_group_list": ['),
    _lint("a number is NaN", "not-json", '{"version": NaN}'),
    _lint("a comment", "json-comment", '{"version": "1.0", // the version\n "status": "completed"}'),
    _lint("a key stands twice", "duplicate-key", '{"server_list": [{"server_id": "a", "server_id": "b"}]}'),
    _lint("lists in lists in lists", "too-deep", "[" * 40 + "]" * 40),
    _lint("a number of 5,000 digits", "too-large", "1" * 5_000),
    _lint("a file of 17 MB", "too-large", " " * 17_000_000 + "{}"),
    _lint("another JSON file", "unknown-dialect", {"name": "pdserve"}),
    _lint("a list instead of an object", "wrong-type", []),
    _lint(
        "ranks run on over two servers of the guide's group 1",
        "ambiguous-dialect",
        modelarts(prefill=[server(A, 4), server(B, 5, first_rank=1)]),
    ),
    _lint("HCCL version 2.0 of Ascend 950", "bad-version", {"version": "2.0", "rank_list": []}),
    _lint("the writer has not written yet", "not-completed", {"status": "initializing", "version": "1.0"}),
)

HEADS = (
    _guide("the version is another", "bad-version", "version", "1.1"),
    _guide("the version is a number", "wrong-type", "version", 1.0),
    _guide("the status is unknown", "bad-status", "status", "done"),
    _guide("the table is still written", "not-completed", "status", "initializing"),
    _guide("a key is missing", "missing-key", f"{_G1}.device.0.rank_id", ...),
    _lint("a table of two groups", "group-count", grouped(*modelarts()["server_group_list"][:2])),
    _lint(
        "a table of four groups",
        "group-count",
        grouped(*modelarts()["server_group_list"], group(2, server(C, 1))),
    ),
    _lint(
        "the groups 1 and 2 are swapped",
        "group-id",
        grouped(group(0, server(A)), group(2, server(A, 4)), group(1, server(B, 6))),
    ),
    _guide("a group of another number", "group-id", "server_group_list.1.group_id", "7"),
    _guide("server_count is not the number of servers", "server-count", "server_group_list.1.server_count", "2"),
    _guide("a group without a server", "empty-list", "server_group_list.2", group(2)),
    _lint("a local table with a role's group id", "local-group-id", {**local(), "group_id": "1"}),
    _lint("more servers than a cluster has", "too-many", modelarts(prefill=[server(A, 4)] * 4097)),
)

VALUES = (
    _guide("a slip in a key", "misspelt-key", f"{_G1}.server_prot", "8088", "--strict"),
    _guide("a masked address, as in the guide", "masked-address", f"{_G1}.server_ip", "10.**.**.18"),
    _guide("a masked device address", "masked-address", f"{_G1}.device.0.device_ip", "10.**.**.22"),
    _guide("no address", "bad-address", f"{_G1}.device.0.device_ip", "10.0.0.999"),
    _guide("a host name for a device", "device-name", f"{_G1}.device.0.device_ip", "npu4.example"),
    _guide("localhost for a device of another host", "device-name", f"{_G1}.device.0.device_ip", "localhost"),
    _guide("an address to listen on", "listen-address", f"{_G1}.server_ip", "0.0.0.0"),
    _guide("no port", "bad-port", f"{_G1}.server_port", "80888"),
    _guide("a device_id that is a number", "wrong-type", f"{_G1}.device.0.device_id", 4),
    _guide("a device_id in words", "bad-number", f"{_G1}.device.0.device_id", "davinci4"),
    _guide("a server_id of blanks", "empty-id", f"{_G1}.server_id", " "),
    _guide("loopback among several hosts", "loopback", "server_group_list.0.server_list.0.server_ip", "127.0.0.1"),
    _guide("a device on loopback among several hosts", "loopback-device", f"{_G1}.device.0.device_ip", "127.0.0.1"),
)

CLUSTERS = (
    _lint(
        "two schedulers",
        "scheduler-count",
        grouped(group(0, server(A), server(B)), *modelarts()["server_group_list"][1:]),
    ),
    _lint(
        "a scheduler with a device",
        "scheduler-device",
        with_value(modelarts(), "server_group_list.0", group(0, server(A, 1))),
        "--dialect",
        "modelarts",
    ),
    _lint(
        "an instance without devices",
        "no-device",
        with_value(modelarts(), f"{_G1}.device", ...),
        "--dialect",
        "modelarts",
    ),
    _lint("ranks with a gap", "rank-id", with_value(modelarts(), f"{_G1}.device.1.rank_id", "2")),
    _lint("ranks that begin with 1", "rank-id", modelarts(prefill=[server(A, 4, 5, first_rank=1)])),
    _lint(
        "one device in a prefill and a decode instance",
        "device-twice",
        modelarts(prefill=[server(A, 4, 5)], decode=[server(A, 5, 6)]),
    ),
    _lint("one device twice in an instance", "device-twice", modelarts(prefill=[server(A, 4, 4)]), "--share-devices"),
    _lint(
        "two instances with one GPU and no ports to tell them apart",
        "same-entry",
        modelarts(prefill=[server(A, 4)], decode=[server(A, 4)]),
        "--share-devices",
    ),
    _guide("one address for two devices", "device-ip-twice", f"{_G2}.device.1.device_ip", "198.51.100.14"),
    _guide("IPv4 and IPv6 in one instance", "device-ip-family", f"{_G1}.device.1.device_ip", "2001:db8::5"),
    _lint(
        "one port for two instances of a host",
        "port-twice",
        modelarts(prefill=[server(A, 4, server_port="8088")], decode=[server(A, 6, server_port="8088")]),
    ),
    _lint(
        "prefill instances of unlike sizes",
        "unequal-tensor-parallel",
        modelarts(prefill=[server(A, 0, 1), server(A, 2)], decode=[server(B, 0, 1)]),
        "--strict",
    ),
    _lint(
        "decode instances of unlike sizes",
        "unequal-tensor-parallel",
        modelarts(prefill=[server(A, 0, 1)], decode=[server(B, 0, 1), server(B, 2)]),
        "--strict",
    ),
    _lint(
        "prefill and decode of unlike sizes",
        "unequal-tensor-parallel",
        modelarts(decode=[server(B, 6)]),
        "--strict",
    ),
    _lint(
        "a local table over two servers, for pdserve",
        "instance-over-servers",
        local(server(A, 0), server(B, 0, first_rank=1)),
        "--strict",
    ),
)

OTHER_DIALECTS = (
    _lint("HCCL: a server_id twice", "server-id-twice", hccl(server(A, 0), server(A, 1, first_rank=1))),
    _hccl("HCCL: a server_id of 65 characters", "long-server-id", "server_list.0.server_id", "a" * 65),
    _lint(
        "HCCL: no device address between two hosts",
        "no-device-ip",
        with_value(hccl(), "server_list.1.device.0.device_ip", ...),
    ),
    _hccl("HCCL: a host name for a device", "device-name", "server_list.0.device.0.device_ip", "npu0.example"),
    _pods(
        "HCCL 1.2: a host name for a device's second address",
        "device-name",
        "server_list.0.device.0.backup_device_ip",
        "npu0.example",
    ),
    _pods("HCCL 1.2: no super_device_id", "no-super-device", "server_list.0.device.0.super_device_id", ...),
    _pods(
        "HCCL 1.2: a super_device_id twice", "super-device-twice", "server_list.1.device.0.super_device_id", "113246208"
    ),
    _pods("HCCL 1.2: an empty super_device_id", "bad-number", "server_list.0.device.0.super_device_id", ""),
    _pods(
        "HCCL 1.2: a super_device_id past 2^30", "number-range", "server_list.0.device.0.super_device_id", "1073741825"
    ),
    _pods("HCCL 1.2: a server in no super pod", "super-pod-missing", "super_pod_list", [pod("1", A)]),
    _pods("HCCL 1.2: a super pod names a stranger", "super-pod-server", "super_pod_list", [pod("1", A, B, C)]),
    _pods("HCCL 1.2: a server in two super pods", "super-pod-twice", "super_pod_list", [pod("1", A, B), pod("2", B)]),
    _lint(
        "HCCL 1.2: a super pod in two pieces",
        "super-pod-apart",
        {
            **hccl_1_2(),
            "server_count": "3",
            "server_list": [
                {**entry, "device": [{**entry["device"][0], "rank_id": str(rank), "super_device_id": str(rank)}]}
                for rank, entry in enumerate(hccl(server(A, 0), server(B, 0), server(C, 0))["server_list"])
            ],
            "super_pod_list": [pod("1", A, C), pod("2", B)],
        },
    ),
    _lint(
        "MindIE: a controller with a device, as the guide's prefill group",
        "scheduler-device",
        modelarts(),
        "--dialect",
        "mindie",
    ),
    _mindie("MindIE: three coordinators", "scheduler-count", "server_group_list.0", group(0, *map(server, (A, B, C)))),
    _mindie("MindIE: no port", "bad-port", "server_group_list.2.server_list.0.predict_port", "99999"),
    _mindie("MindIE: no port, as a number", "bad-port", "server_group_list.0.server_list.1.mgmt_port", 0),
    _mindie(
        "MindIE: a device_id past 2048", "number-range", "server_group_list.3.server_list.0.device.0.device_id", "2049"
    ),
    _lint(
        "MindIE: more than 98 groups",
        "too-many",
        grouped(*mindie()["server_group_list"][:2], *(group(n, server(A, n), deploy_server="0") for n in range(2, 99))),
    ),
    _lint("kubeinfer: --num-prefill leaves no decode instance", "num-prefill", kubeinfer(), "--num-prefill", "3"),
    _lint(
        "vllm-ascend: --devices-per-instance divides no list",
        "devices-per-instance",
        vllm_ascend(),
        "--devices-per-instance",
        "3",
    ),
    _vllm(
        "vllm-ascend: one cluster_id for prefill and decode",
        "cluster-id-twice",
        "decode_device_list.0.cluster_id",
        "1",
    ),
    _vllm("vllm-ascend: a false server_count", "server-count", "server_count", "2"),
    _vllm("vllm-ascend: an empty list", "empty-list", "decode_device_list", []),
)

SEVERAL_FILES = (
    Broken(
        "a local table whose device_ip is another",
        "not-in-global",
        {"g.json": modelarts(), "l.json": with_value(local(), "server_list.0.device.0.device_ip", "198.51.100.99")},
        ("lint", "g.json", "l.json"),
    ),
    Broken(
        "a local table of other devices",
        "not-in-global",
        {"g.json": modelarts(), "l.json": local(server(B, 0, 1))},
        ("lint", "g.json", "l.json"),
    ),
    Broken(
        "two local tables of one entry",
        "local-twice",
        {"g.json": modelarts(), "l.json": local(), "l2.json": local()},
        ("lint", "g.json", "l.json", "l2.json"),
    ),
    Broken(
        "a local table is missing",
        "no-local",
        {"g.json": _ONE_HOST, "l.json": local(server(A, 0))},
        ("lint", "g.json", "l.json", "--strict"),
    ),
    Broken(
        "a local table with another port",
        "port-differs",
        {
            "g.json": modelarts(decode=[server(B, 6, 7, server_port="8089")]),
            "l.json": local(server(B, 6, 7, server_port="8090")),
        },
        ("lint", "g.json", "l.json", "--strict"),
    ),
    Broken(
        "two hosts with different global tables",
        "globals-differ",
        {"g.json": modelarts(), "g2.json": modelarts(decode=[server(C, 6, 7)])},
        ("lint", "g.json", "g2.json"),
    ),
    _lint("NODE_PORTS with one port for two instances", "node-ports", modelarts(), "--node-ports", "8088"),
    _lint("NODE_PORTS with one port twice on a host", "node-ports", _ONE_HOST, "--node-ports", "8088,8088"),
    _lint(
        "NODE_PORTS in another order than the table",
        "node-ports",
        modelarts(prefill=[server(A, 4, server_port="8088")], decode=[server(B, 6, server_port="8089")]),
        "--node-ports",
        "8089,8088",
    ),
)

SECTIONS: Mapping[str, tuple[Broken, ...]] = {
    "Tables: files": FILES,
    "Tables: the table as a whole": HEADS,
    "Tables: single values": VALUES,
    "Tables: devices, ports and sizes": CLUSTERS,
    "Tables: other dialects": OTHER_DIALECTS,
    "Tables: several files": SEVERAL_FILES,
}
