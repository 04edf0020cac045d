"""All rules: those checked over a table once it is read, and the sentences of those that reading itself keeps."""

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
    "duplicate-key": "a key of an object stands once",
    "unknown-dialect": "the file is a table of a dialect we know",
    "ambiguous-dialect": "the table is of one dialect, or --dialect says which",
    "bad-version": "the version is one that the dialect has",
    "bad-status": "the status is `completed`",
    "not-completed": "the table is whole: its status is not `initializing`",
    "missing-key": "every key that the dialect wants is there",
    "wrong-type": "strings are strings, lists lists, objects objects",
    "too-many": "a list has at most 4,096 elements (MindIE: at most 98 groups)",
    "empty-list": "lists of servers and devices are not empty",
    "group-count": "a whole table of the guide has exactly three groups",
    "group-id": "groups stand in order, each once",
    "local-group-id": "a local table has the group id 0",
    "server-count": "server_count is the number of servers in server_list",
    "empty-id": "a server_id is not empty",
    "long-server-id": "HCCL: a server_id has at most 64 characters",
    "masked-address": "addresses are written out, not masked",
    "bad-address": "an address is an address or a host name",
    "listen-address": "an address is one to reach a host at, not one to listen on",
    "bad-port": "a port is from 1 to 65535",
    "bad-number": "ids and ranks are whole numbers, as strings",
    "number-range": "MindIE and HCCL: ids are within their range",
    "super-pod-missing": "each server stands in super_pod_list",
    "super-pod-server": "super_pod_list names only servers of the table",
    "super-pod-twice": "a server is in one super pod",
    "num-prefill": "--num-prefill leaves a decode instance",
    "devices-per-instance": "--devices-per-instance divides the number of devices",
    "cluster-id-twice": "vllm-ascend: each device has a cluster_id of its own",
}
"""Code and sentence of the rules kept while a file is read; they are all errors."""

KEY_RULES: Mapping[str, str] = {"misspelt-key": "no key is nearly one that is read"}
"""Code and sentence of what lint notes about keys."""

ACROSS_RULES: Mapping[str, str] = {
    "not-in-global": "a local table is an entry of the global table, address by address",
    "local-twice": "no two local tables are the same entry",
    "no-local": "with local tables of a host given, each of its entries has one",
    "port-differs": "a local table has the server_port of its entry in the global table",
    "globals-differ": "every host has the same global table",
    "node-ports": "NODE_PORTS has one port per instance, in table order",
}
"""Code and sentence of the rules between files and variables."""


def broken(
    reading: TableReading, options: RuleOptions, known: Sequence[Problem] = ()
) -> Iterator[tuple[Severity, Problem]]:
    """Yield what breaks a rule in a table that was read, with how severe that is.

    `known` is what reading found wrong: what only follows from it, at the same place or around it, is left out, and
    so are notes.
    """
    for rule in TABLE_RULES:
        for problem in rule.check(reading, options):
            if not known or (rule.severity == "error" and not any(_follows(problem, other) for other in known)):
                yield rule.severity, problem


def errors(reading: TableReading, options: RuleOptions = RuleOptions(), known: Sequence[Problem] = ()) -> list[Problem]:
    """Return what keeps a table from being used, beside what reading found."""
    return [problem for severity, problem in broken(reading, options, known) if severity == "error"]


def _follows(problem: Problem, known: Problem) -> bool:
    longer, shorter = (
        (problem.place, known.place) if len(problem.place) > len(known.place) else (known.place, problem.place)
    )
    return longer.startswith(shorter) and longer[len(shorter) : len(shorter) + 1] in ("", ".", "[")
