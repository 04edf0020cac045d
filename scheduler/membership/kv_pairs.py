"""Which prefill and decode instances can hand off prompts: those with a common KV transport.

This is known as soon as both have been described, before a prompt is placed on the pair. A pair of workers of another
engine must also have answered like its decode worker alone (scheduler/workers/proof.py).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from scheduler.membership.compatibility import ExpectedInstance
from telemetry.logs import EventLogger
from wire.description import InstanceDescription
from wire.types import Role

_log = EventLogger("registry")


class GapKind(Enum):
    """Why a pair cannot hand off prompts; only the first is an error of the configuration."""

    NO_TRANSPORT = "no transport"
    OTHER_ENGINE = "other engine"
    UNPROVEN = "unproven"
    DISPROVEN = "disproven"


UNPROVEN = (GapKind.UNPROVEN, GapKind.DISPROVEN)
"""The gaps that a proof closes: not tried yet, or tried without success."""


@dataclass(frozen=True, slots=True)
class KvGap:
    """A prefill and a decode instance, by table index, that cannot hand off prompts. `why` names both.

    If a worker must not serve alone, `sender` and `receiver` are both that worker.
    """

    sender: int
    receiver: int
    why: str
    kind: GapKind = GapKind.NO_TRANSPORT

    def __str__(self) -> str:
        return self.why


_NO_GAPS: Mapping[int, KvGap] = {}
_MAX_FAILURES = 2
"""How many hand-offs of a pair of workers may fail in a row: one may be the request's own fault."""


class KvPairs:
    """Owner of the known pairs; logs each gap when it appears and when it closes."""

    def __init__(self) -> None:
        self._accepted: dict[int, tuple[ExpectedInstance, InstanceDescription]] = {}
        self._roles: dict[int, Role] = {}  # of those whose role is not the table's
        self._gaps: dict[int, dict[int, KvGap]] = {}  # by sender, then by receiver
        self._failures: dict[tuple[int, int], int] = {}  # in a row, of the pair's current processes

    def add(self, expected: ExpectedInstance, description: InstanceDescription) -> None:
        """Check a newly accepted instance against all accepted earlier."""
        self._accepted[expected.index] = expected, description
        self._forget_failures(expected.index)
        self._check_all(expected.index)
        self._check_alone(expected)

    def set_role(self, index: int, role: Role) -> None:
        """Check the pairs that one of our own instances forms in its new role."""
        self._roles[index] = role
        if index in self._accepted:
            self._forget_gaps(index)
            self._check_all(index)

    def may_pair(self, sender: int, receiver: int) -> bool:
        """Whether this pair could transfer KV if the one prefilled and the other decoded."""
        (start, sending), (end, receiving) = self._accepted[sender], self._accepted[receiver]
        if start.is_worker or end.is_worker:
            return start.is_worker and end.is_worker and self.gap(sender, receiver) is None
        return missing_transport(sending, receiving) is None

    def forget(self, index: int) -> None:
        """Drop the pairs of an instance that left."""
        self._accepted.pop(index, None)
        self._roles.pop(index, None)
        self._forget_failures(index)
        self._forget_gaps(index)

    def gap(self, sender: int, receiver: int) -> KvGap | None:
        """Return why this pair cannot transfer KV; None if it may."""
        return self._gaps.get(sender, _NO_GAPS).get(receiver)

    def gaps_from(self, sender: int) -> Mapping[int, KvGap]:
        """Return why this sender cannot transfer KV, by receiver."""
        return self._gaps.get(sender, _NO_GAPS)

    def gaps(self, living: Collection[int]) -> list[KvGap]:
        """Return the gaps between these instances, in table order."""
        between = [gap for gaps in self._gaps.values() for gap in gaps.values()]
        between = [gap for gap in between if gap.sender in living and gap.receiver in living]
        return sorted(between, key=lambda gap: (gap.sender, gap.receiver))

    def prove(self, sender: int, receiver: int) -> None:
        """Record that this pair of workers answers like its decode worker alone."""
        gap = self.gap(sender, receiver)
        if gap is not None and gap.kind in UNPROVEN:
            del self._gaps[sender][receiver]

    def note_use(self, sender: int, receiver: int) -> None:
        """Record that a hand-off of this pair succeeded."""
        self._failures.pop((sender, receiver), None)

    def note_failure(self, sender: int, receiver: int) -> bool:
        """Record that a request failed on this pair of workers; return whether it must now be proven again.

        NIXL may fail all transfers of a pair while both workers look healthy.
        """
        count = self._failures.get((sender, receiver), 0) + 1
        self._failures[sender, receiver] = count
        if count < _MAX_FAILURES:
            return False
        del self._failures[sender, receiver]
        self.disprove(sender, receiver, f"{count} requests in a row failed", GapKind.UNPROVEN)
        return True

    def disprove(self, sender: int, receiver: int, why: str, kind: GapKind = GapKind.DISPROVEN) -> None:
        """Record that this pair does not answer like its decode worker alone, or is not known to."""
        start, end = self._accepted[sender][0], self._accepted[receiver][0]
        text = f"{start} and {end} have not answered like {end.name} alone: {why}"
        self._set(KvGap(sender, receiver, f"{end}: {why}" if sender == receiver else text, kind))

    def _set(self, gap: KvGap) -> None:
        self._gaps.setdefault(gap.sender, {})[gap.receiver] = gap

    def _forget_failures(self, index: int) -> None:
        self._failures = {pair: count for pair, count in self._failures.items() if index not in pair}

    def _forget_gaps(self, index: int) -> None:
        self._gaps.pop(index, None)
        for gaps in self._gaps.values():
            gaps.pop(index, None)

    def _check_all(self, index: int) -> None:
        for other in list(self._accepted):
            self._check(index, other)
            self._check(other, index)

    def _role(self, expected: ExpectedInstance) -> Role:
        return self._roles.get(expected.index, expected.role)

    def _check_alone(self, expected: ExpectedInstance) -> None:
        """Let a combined worker next to our own instances serve once it has been compared with them."""
        has_own = any(not one.is_worker for one, _ in self._accepted.values())
        if expected.is_worker and expected.role is Role.COMBINED and has_own:
            self.disprove(expected.index, expected.index, "not compared with our own instances yet", GapKind.UNPROVEN)
        else:
            self._gaps.get(expected.index, {}).pop(expected.index, None)

    def _check(self, sender: int, receiver: int) -> None:
        (start, sending), (end, receiving) = self._accepted[sender], self._accepted[receiver]
        if self._role(start) is not Role.PREFILL or self._role(end) is not Role.DECODE:
            return
        if start.is_worker != end.is_worker:
            why = f"{start.name} and {end.name} are of different engines"
            self._set(KvGap(sender, receiver, why, GapKind.OTHER_ENGINE))
            return
        before, lacking = self._gaps.get(sender, {}).pop(receiver, None), missing_transport(sending, receiving)
        if lacking is None and start.is_worker:
            self.disprove(sender, receiver, "not tried yet", GapKind.UNPROVEN)
            return
        if lacking is None:
            if before is not None:
                _log.info("kv_transport_found", prefill=start, decode=end)
            return
        have = f"{start.name} has {_names(sending)} and {end.name} has {_names(receiving)}"
        gap = KvGap(sender, receiver, f"no usable KV transport: {have}; {lacking}")
        self._set(gap)
        if gap != before:
            hosts = ", ".join(sorted({one.host_id for side in (sending, receiving) for one in side.endpoints} - {""}))
            _log.warning("no_kv_transport", prefill=start, decode=end, reason=gap, hosts=hosts)


def missing_transport(sender: InstanceDescription, receiver: InstanceDescription) -> str | None:
    """Return why the two have no common KV transport; None if they may have one, or if either lists no endpoints. Pure.

    A sender's own endpoints show its transports: an instance sends and receives by the same ones.
    """
    if not sender.endpoints or not receiver.endpoints:
        return None
    ours, theirs = ({(one.transport, one.host_id) for one in described.endpoints} for described in (sender, receiver))
    if ours & theirs:
        return None
    same = sorted({name for name, _ in ours} & {name for name, _ in theirs})
    if not same:
        return "name one transport for both in --kv-transport"
    return f"{', '.join(same)} cannot cross hosts or network namespaces: name tcp for both in --kv-transport"


def _names(found: InstanceDescription) -> str:
    return ", ".join(dict.fromkeys(endpoint.transport for endpoint in found.endpoints))
