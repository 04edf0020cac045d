"""Every known broken table, as data: what is broken, the rule that finds it, the files, and the command line."""

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
    local,
    modelarts,
    server,
)

LINT = ("lint", "t.json")


def with_value(document: Document, path: str, value: object) -> Document:
    """Set the value at a path like `server_group_list.1.group_id`; `...` removes it."""
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


def lint_row(what: str, rule: str, document: Document | list[object] | str, *flags: str) -> Broken:
    """Return a row of one file that lint is given with these flags."""
    return Broken(what, rule, {"t.json": document}, (*LINT, *flags))


def changed(base: Callable[[], Document]) -> Callable[..., Broken]:
    """Return a function that makes a row of a sample with one value changed: what, rule, path, value, flags."""

    def row(what: str, rule: str, path: str, value: object, *flags: str) -> Broken:
        return lint_row(what, rule, with_value(base(), path, value), *flags)

    return row


_guide = changed(modelarts)
_worker = changed(lambda: modelarts(prefill=[server(A, 4, 5, worker="vllm")], decode=[server(B, 6, 7, worker="vllm")]))


def _workers(prefill: list[tuple[int, ...]], decode: list[tuple[int, ...]], worker: str) -> Document:
    """A table of workers on two hosts, by their devices."""
    listed = [[server(ip, *ids, worker=worker) for ids in role] for ip, role in ((A, prefill), (B, decode))]
    return modelarts(*listed)


_G1 = "server_group_list.1.server_list.0"
_G2 = "server_group_list.2.server_list.0"
_ONE_HOST = modelarts(prefill=[server(A, 0)], decode=[server(A, 1)])
_LOOPBACK = with_value(modelarts(), "server_group_list.0.server_list.0.server_ip", "localhost")

FILES = (
    Broken("the file does not exist", "unreadable", {}, ("lint", "gone.json")),
    Broken("no name, as a variable that is not set gives it", "unreadable", {}, ("lint", "")),
    lint_row("the file is cut off", "not-json", '{"version": "1.0", "server_group_list": ['),
    lint_row("a number is NaN", "not-json", '{"version": NaN}'),
    lint_row("a comment", "json-comment", '{"version": "1.0", // the version\n "status": "completed"}'),
    lint_row("a duplicate key", "duplicate-key", '{"server_list": [{"server_id": "a", "server_id": "b"}]}'),
    lint_row("lists in lists in lists", "too-deep", "[" * 40 + "]" * 40),
    lint_row("a number of 5,000 digits", "too-large", "1" * 5_000),
    lint_row("a file of 17 MB", "too-large", " " * 17_000_000 + "{}"),
    lint_row("another JSON file", "unknown-dialect", {"name": "pdserve"}),
    lint_row("a list instead of an object", "wrong-type", []),
    lint_row(
        "ranks continue over two servers of the guide's group 1",
        "ambiguous-dialect",
        modelarts(prefill=[server(A, 4), server(B, 5, first_rank=1)]),
    ),
    lint_row("HCCL version 2.0 of Ascend 950", "bad-version", {"version": "2.0", "rank_list": []}),
    lint_row("the writer has not written yet", "not-completed", {"status": "initializing", "version": "1.0"}),
)

HEADS = (
    _guide("the version is another", "bad-version", "version", "1.1"),
    _guide("the version is a number", "wrong-type", "version", 1.0),
    _guide("the status is unknown", "bad-status", "status", "done"),
    _guide("the table is still written", "not-completed", "status", "initializing"),
    _guide("a key is missing", "missing-key", f"{_G1}.device.0.rank_id", ...),
    lint_row("a table of two groups", "group-count", grouped(*modelarts()["server_group_list"][:2])),
    lint_row(
        "a table of four groups",
        "group-count",
        grouped(*modelarts()["server_group_list"], group(2, server(C, 1))),
    ),
    lint_row(
        "the groups 1 and 2 are swapped",
        "group-id",
        grouped(group(0, server(A)), group(2, server(A, 4)), group(1, server(B, 6))),
    ),
    _guide("a group of another number", "group-id", "server_group_list.1.group_id", "7"),
    _guide("server_count is not the number of servers", "server-count", "server_group_list.1.server_count", "2"),
    _guide("a group without a server", "empty-list", "server_group_list.2", group(2)),
    lint_row("a local table with a role's group id", "local-group-id", {**local(), "group_id": "1"}),
    lint_row("more servers than a cluster has", "too-many", modelarts(prefill=[server(A, 4)] * 4097)),
)

VALUES = (
    _guide("a typo in a key", "misspelt-key", f"{_G1}.server_prot", "8088", "--strict"),
    _guide("a masked address, as in the guide", "masked-address", f"{_G1}.server_ip", "10.**.**.18"),
    _guide("a masked device address", "masked-address", f"{_G1}.device.0.device_ip", "10.**.**.22"),
    _guide("no address", "bad-address", f"{_G1}.device.0.device_ip", "10.0.0.999"),
    _guide("a host name for a device", "device-name", f"{_G1}.device.0.device_ip", "npu4.example"),
    _guide("localhost for a device of another host", "device-name", f"{_G1}.device.0.device_ip", "localhost"),
    _guide("an address to listen on", "listen-address", f"{_G1}.server_ip", "0.0.0.0"),
    _guide("no port", "bad-port", f"{_G1}.server_port", "80888"),
    _guide("a device_id that is a number", "wrong-type", f"{_G1}.device.0.device_id", 4),
    _guide("a device_id that is not a number", "bad-number", f"{_G1}.device.0.device_id", "davinci4"),
    _guide("a worker of an engine that is not served", "worker-kind", f"{_G1}.worker", "sglang"),
    _guide("a URL that no worker has", "worker-entry", f"{_G1}.url", "http://192.0.2.1:8101"),
    _worker("a scheduler of another engine", "worker-entry", "server_group_list.0.server_list.0.worker", "vllm"),
    _worker("a worker's URL with a user", "bad-url", f"{_G1}.url", "http://root:x@192.0.2.1:8101"),
    _worker("a worker's URL with a path", "bad-url", f"{_G1}.url", "http://192.0.2.1:8101/v1"),
    _worker("a worker's URL with a query", "bad-url", f"{_G1}.url", "http://192.0.2.1:8101?a=1"),
    _worker("a worker's URL of another protocol", "bad-url", f"{_G1}.url", "ftp://192.0.2.1:8101"),
    _worker("a worker's URL with port 0", "bad-url", f"{_G1}.url", "http://192.0.2.1:0"),
    _worker("a worker's URL to listen on", "bad-url", f"{_G1}.url", "http://0.0.0.0:8101"),
    _guide("a server_id of blanks", "empty-id", f"{_G1}.server_id", " "),
    _guide("loopback among several hosts", "loopback", "server_group_list.0.server_list.0.server_ip", "127.0.0.1"),
    _guide("a device on loopback among several hosts", "loopback-device", f"{_G1}.device.0.device_ip", "127.0.0.1"),
)

CLUSTERS = (
    lint_row(
        "two schedulers",
        "scheduler-count",
        grouped(group(0, server(A), server(B)), *modelarts()["server_group_list"][1:]),
    ),
    lint_row(
        "a scheduler with a device",
        "scheduler-device",
        with_value(modelarts(), "server_group_list.0", group(0, server(A, 1))),
        "--dialect",
        "modelarts",
    ),
    lint_row(
        "an instance without devices",
        "no-device",
        with_value(modelarts(), f"{_G1}.device", ...),
        "--dialect",
        "modelarts",
    ),
    lint_row("ranks with a gap", "rank-id", with_value(modelarts(), f"{_G1}.device.1.rank_id", "2")),
    lint_row("ranks that begin with 1", "rank-id", modelarts(prefill=[server(A, 4, 5, first_rank=1)])),
    lint_row(
        "one device in a prefill and a decode instance",
        "device-twice",
        modelarts(prefill=[server(A, 4, 5)], decode=[server(A, 5, 6)]),
    ),
    lint_row(
        "one device twice in an instance", "device-twice", modelarts(prefill=[server(A, 4, 4)]), "--share-devices"
    ),
    lint_row(
        "two instances with one GPU and no ports to tell them apart",
        "same-entry",
        modelarts(prefill=[server(A, 4)], decode=[server(A, 4)]),
        "--share-devices",
    ),
    _guide("one address for two devices", "device-ip-twice", f"{_G2}.device.1.device_ip", "198.51.100.14"),
    _guide("IPv4 and IPv6 in one instance", "device-ip-family", f"{_G1}.device.1.device_ip", "2001:db8::5"),
    lint_row(
        "one port for two instances of a host",
        "port-twice",
        modelarts(prefill=[server(A, 4, server_port="8088")], decode=[server(A, 6, server_port="8088")]),
    ),
    lint_row(
        "one address for a worker and an instance",
        "port-twice",
        modelarts(
            prefill=[server(A, 4, worker="vllm", url=f"http://{A}:8088")],
            decode=[server(A, 6, worker="vllm", server_port="8088")],
        ),
    ),
    lint_row(
        "one URL for workers of two engines",
        "port-twice",
        modelarts(
            prefill=[server(A, worker="vllm", url=f"http://{A}:1")],
            decode=[server(A, worker="vllm-ascend", url=f"http://{A}:1")],
        ),
    ),
    lint_row(
        "two workers without devices and ports to tell them apart",
        "same-entry",
        _workers([(4, 5)], [(), ()], worker="vllm"),
    ),
    lint_row(
        "prefill instances of different sizes",
        "unequal-tensor-parallel",
        modelarts(prefill=[server(A, 0, 1), server(A, 2)], decode=[server(B, 0, 1)]),
        "--strict",
    ),
    lint_row(
        "decode instances of different sizes",
        "unequal-tensor-parallel",
        modelarts(prefill=[server(A, 0, 1)], decode=[server(B, 0, 1), server(B, 2)]),
        "--strict",
    ),
    lint_row(
        "prefill and decode of different sizes",
        "unequal-tensor-parallel",
        modelarts(decode=[server(B, 6)]),
        "--strict",
    ),
    lint_row(
        "a worker's KV port that is another's --port",
        "worker-port-twice",
        modelarts(
            prefill=[server(A, 4, 5, worker="vllm")], decode=[server(A, 6, 7, worker="vllm", server_port="5665")]
        ),
    ),
    lint_row(
        "KV ports of two workers that share a GPU",
        "worker-port-twice",
        modelarts(
            prefill=[server(A, 4, worker="vllm", server_port="8088")],
            decode=[server(A, 4, worker="vllm", server_port="8089")],
        ),
        "--share-devices",
    ),
    lint_row(
        "sizes of vLLM's workers that do not divide each other",
        "worker-sizes",
        _workers([(0, 1)], [(0, 1, 2)], worker="vllm"),
        "--strict",
    ),
    lint_row(
        "a decode worker of vllm-ascend above the prefill worker's size",
        "worker-sizes",
        _workers([(0,)], [(0, 1)], worker="vllm-ascend"),
        "--strict",
    ),
    lint_row(
        "prefill workers of vllm-ascend of different sizes",
        "worker-sizes",
        _workers([(0, 1), (2, 3, 4, 5)], [(0, 1)], worker="vllm-ascend"),
        "--strict",
    ),
    lint_row(
        "workers of one engine in prefill and of another in decode",
        "worker-kinds",
        modelarts(prefill=[server(A, 4, 5, worker="vllm")], decode=[server(B, 6, 7, worker="vllm-ascend")]),
    ),
    lint_row(
        "workers of another engine in decode only",
        "worker-kinds",
        modelarts(decode=[server(B, 6, 7, worker="vllm")]),
    ),
    lint_row(
        "a local table over two servers, for pdserve",
        "instance-over-servers",
        local(server(A, 0), server(B, 0, first_rank=1)),
        "--strict",
    ),
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
    lint_row("NODE_PORTS with one port for two instances", "node-ports", modelarts(), "--node-ports", "8088"),
    lint_row("NODE_PORTS with one port twice on a host", "node-ports", _ONE_HOST, "--node-ports", "8088,8088"),
    lint_row(
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
    "Tables: several files": SEVERAL_FILES,
}
