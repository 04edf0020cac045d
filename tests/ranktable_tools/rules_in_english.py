"""The rules that are checked while reading and across files, by code, for docs/ranktable.md."""

from collections.abc import Mapping

READING_RULES: Mapping[str, str] = {
    "unreadable": "the file can be read",
    "too-large": "the file is at most 16 MiB, a number in it 640 digits",
    "not-json": "the file is JSON",
    "json-comment": "JSON has no comments",
    "too-deep": "lists and objects are at most 32 deep",
    "duplicate-key": "the keys of an object are unique",
    "unknown-dialect": "the file is a table of a known dialect",
    "ambiguous-dialect": "the table matches one dialect, or --dialect chooses it",
    "bad-version": "the version is one of the dialect's",
    "bad-status": "the status is `completed`",
    "not-completed": "the table is complete: its status is not `initializing`",
    "missing-key": "every key that the dialect requires is present",
    "wrong-type": "every value has the type that the dialect requires",
    "too-many": "a list has at most 4,096 elements (MindIE: at most 98 groups)",
    "empty-list": "lists of servers and devices are not empty",
    "group-count": "a complete table of the guide has exactly three groups",
    "group-id": "groups are in order, each once",
    "local-group-id": "a local table has the group id 0",
    "server-count": "server_count is the number of servers in server_list",
    "empty-id": "a server_id is not empty",
    "long-server-id": "HCCL: a server_id has at most 64 characters",
    "masked-address": "addresses are not masked",
    "bad-address": "an address is numeric or a host name",
    "listen-address": "an address is one to connect to, not one to listen on",
    "bad-port": "a port is from 1 to 65535",
    "worker-kind": "a worker is of an engine that is served",
    "bad-url": "a worker's URL is `http://HOST:PORT` or https",
    "bad-number": "ids and ranks are whole numbers, as strings",
    "number-range": "MindIE and HCCL: ids are within their range",
    "super-pod-missing": "each server is in super_pod_list",
    "super-pod-server": "super_pod_list names only servers of the table",
    "super-pod-twice": "a server is in one super pod",
    "num-prefill": "--num-prefill leaves a decode instance",
    "devices-per-instance": "--devices-per-instance divides the number of devices",
    "cluster-id-twice": "vllm-ascend: each device has its own cluster_id",
}
"""Code and description of the rules checked while a file is read; all are errors."""

KEY_RULES: Mapping[str, str] = {"misspelt-key": "no unread key resembles a known one"}
"""Code and description of lint's notes about keys."""

ACROSS_RULES: Mapping[str, str] = {
    "not-in-global": "a local table is an entry of the global table, address by address",
    "local-twice": "no two local tables match the same entry",
    "no-local": "if local tables of a host are given, each of its entries has one",
    "port-differs": "a local table has the server_port of its entry in the global table",
    "globals-differ": "every host has the same global table",
    "node-ports": "NODE_PORTS has one port per instance, in table order",
}
"""Code and description of the rules across files and variables."""
