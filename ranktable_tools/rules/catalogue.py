"""All rules: those checked on a table after reading, and the descriptions of those checked while reading."""

from collections.abc import Iterator, Mapping, Sequence

from ranktable_tools.document import Problem
from ranktable_tools.reading import TableReading
from ranktable_tools.rules.devices import DEVICE_RULES
from ranktable_tools.rules.hccl import HCCL_RULES
from ranktable_tools.rules.rule import Rule, RuleOptions, Severity
from ranktable_tools.rules.servers import SERVER_RULES

TABLE_RULES: tuple[Rule, ...] = (*DEVICE_RULES, *SERVER_RULES, *HCCL_RULES)

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


def broken(
    reading: TableReading, options: RuleOptions, known: Sequence[Problem] = ()
) -> Iterator[tuple[Severity, Problem]]:
    """Yield each problem of a table that was read, with its severity.

    `known` are the problems found while reading. If there are any, notes are omitted, and so are problems at the same
    place or around it, since they only follow from those.
    """
    for rule in TABLE_RULES:
        for problem in rule.check(reading, options):
            if not known or (rule.severity == "error" and not any(_follows(problem, other) for other in known)):
                yield rule.severity, problem


def errors(reading: TableReading, options: RuleOptions = RuleOptions(), known: Sequence[Problem] = ()) -> list[Problem]:
    """Return the errors that make a table unusable, other than those found while reading."""
    return [problem for severity, problem in broken(reading, options, known) if severity == "error"]


def _follows(problem: Problem, known: Problem) -> bool:
    longer, shorter = (
        (problem.place, known.place) if len(problem.place) > len(known.place) else (known.place, problem.place)
    )
    return longer.startswith(shorter) and longer[len(shorter) : len(shorter) + 1] in ("", ".", "[")
