"""Merge the parts of the existing pods into the cluster's table. Pure, except for resolving host names.

The table is `initializing` until every configured instance has its part, then `completed` and live: new instances are
added, terminating pods are removed, and a table without a prefill or decode instance is never written.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ranktable_tools.dialects import modelarts
from ranktable_tools.dialects.entries import text_of
from ranktable_tools.document import Node
from ranktable_tools.errors import RanktableError
from ranktable_tools.json_file import parse_json
from ranktable_tools.kube.api import Pod
from ranktable_tools.merge import NamedPart, merge
from ranktable_tools.rules.catalogue import errors
from ranktable_tools.table_file import part_of, refusal
from ranktable_tools.tables import GlobalTable, TablePart, TableServer

INITIALIZING = text_of({"version": "1.0", "status": "initializing"})


@dataclass(frozen=True, slots=True)
class ClusterSize:
    """The configured number of instances of each role, which the first complete table must have."""

    prefill: int
    decode: int


@dataclass(frozen=True, slots=True)
class Decision:
    """The new table: its text, a one-line summary, and a note for each thing to fix or wait for."""

    text: str
    description: str
    notes: tuple[str, ...] = ()


def decide(texts: Mapping[str, str], pods: Sequence[Pod], current: str | None, wanted: ClusterSize) -> Decision:
    """Return the new table. `texts` has each pod's part by pod name, `current` is the table written last."""
    notes: list[str] = []
    parts = list(_one_scheduler(_living_parts(texts, {pod.name: pod for pod in pods}, notes)))
    live = current is not None and is_completed(current)
    before, description = (current, "completed") if live and current is not None else (INITIALIZING, "initializing")
    missing = list(_missing_roles(parts, ClusterSize(1, 1) if live else wanted))
    if missing:
        return Decision(
            before, description, (*notes, f"{'kept as it is' if live else 'waiting'}: {'; '.join(missing)}")
        )
    merged = _merged(parts, _servers(before), notes)
    if merged is None:
        return Decision(before, description, tuple(notes))
    members = ", ".join(f"{instance} {instance.server.server_ip}" for instance in merged.instances)
    return Decision(modelarts.global_text(merged), f"completed: {members}", tuple(notes))


def is_completed(text: str) -> bool:
    """Return whether a table's text has the status `completed`."""
    try:
        document = parse_json(text, "the table")
    except RanktableError:
        return False
    return isinstance(document, dict) and document.get("status") == "completed"


def read_part(text: str, name: str) -> TablePart:
    """Return the part that a pod wrote. Raises RanktableError naming the pod, place and value."""
    root = Node(parse_json(text, name), "", [])
    reading = modelarts.read_global(root)
    problems = [*root.problems, *errors(reading, known=root.problems)]
    if problems:
        raise refusal(name, problems)
    return part_of(reading.table)


def _living_parts(texts: Mapping[str, str], pods: Mapping[str, Pod], notes: list[str]) -> Iterator[NamedPart]:
    """Yield the parts of pods that are not terminating, by name; unreadable parts are noted."""
    for name in sorted(texts, key=_natural_order):
        pod = pods.get(name)
        if pod is None or pod.leaving:
            continue
        try:
            part = read_part(texts[name], name)
        except RanktableError as error:
            notes.append(f"left out: {error}")
            continue
        foreign = _foreign_address(part, pod)
        if foreign is None:
            yield NamedPart(name, part)
        elif pod.addresses:
            notes.append(f"left out: {name} wrote {foreign}, but the pod has {', '.join(pod.addresses)}")


def _foreign_address(part: TablePart, pod: Pod) -> str | None:
    """Return an instance's address that is not the pod's: an earlier pod of this name wrote the part."""
    hosts = (instance.server.server_ip for instance in part.instances)
    return next((host for host in hosts if host not in pod.addresses), None)


def _one_scheduler(parts: Iterator[NamedPart]) -> Iterator[NamedPart]:
    """Skip duplicate parts of scheduler pods: during a replacement, two pods have the same part."""
    seen = list[TablePart]()
    for named in parts:
        if named.part.scheduler is None:
            yield named
        elif named.part not in seen:
            seen.append(named.part)
            yield named


def _merged(parts: Sequence[NamedPart], serving: frozenset[TableServer], notes: list[str]) -> GlobalTable | None:
    """Merge the parts. If they conflict, leave out one, preferably that of a pod that does not serve yet.

    Thus a pod that claims another pod's card affects neither the other pod nor new ones.
    """
    try:
        return merge(parts)
    except RanktableError as error:
        clash = error
    for index in sorted(range(len(parts)), key=lambda index: (_is_serving(parts[index].part, serving), -index)):
        with contextlib.suppress(RanktableError):
            merged = merge([*parts[:index], *parts[index + 1 :]])
            notes.append(f"left out: {parts[index].path}: {clash}")
            return merged
    notes.append(f"not merged: {clash}")
    return None


def _servers(table: str) -> frozenset[TableServer]:
    """Return the entries of a table, none if it is broken or not written yet."""
    with contextlib.suppress(RanktableError):
        return frozenset(instance.server for instance in read_part(table, "the table").instances)
    return frozenset()


def _is_serving(part: TablePart, serving: frozenset[TableServer]) -> bool:
    return any(instance.server in serving for instance in part.instances)


def _missing_roles(parts: Sequence[NamedPart], wanted: ClusterSize) -> Iterator[str]:
    if not any(named.part.scheduler for named in parts):
        yield "no scheduler"
    for role, number in (("prefill", wanted.prefill), ("decode", wanted.decode)):
        found = sum(len(named.part.prefill if role == "prefill" else named.part.decode) for named in parts)
        if found < number:
            yield f"{found} of {number} {role} instances"


def _natural_order(name: str) -> list[tuple[int, str]]:
    """Order names by their numbers: prefill-2 before prefill-10."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in re.split(r"([0-9]+)", name)]
