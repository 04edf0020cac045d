"""Which prefill and decode instances can hand off prompts: those with a common KV transport.

Known as soon as both have been described, before a prompt is placed on the pair. A pair of workers of another engine
must also have answered like its decode worker alone (scheduler/workers/proof.py).
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from scheduler.membership.compatibility import ExpectedInstance
from telemetry.logs import EventLogger
from wire.types import InstanceDescription, Role

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
    """A prefill and a decode instance, by table index, that cannot hand off prompts. `why` names both."""

    sender: int
    receiver: int
    why: str
    kind: GapKind = GapKind.NO_TRANSPORT

    def __str__(self) -> str:
        return self.why


class KvPairs:
    """Owner of the known pairs; logs each gap when it appears and when it closes."""

    def __init__(self) -> None:
        self._accepted: dict[int, tuple[ExpectedInstance, InstanceDescription]] = {}
        self._gaps: dict[tuple[int, int], KvGap] = {}

    def add(self, expected: ExpectedInstance, description: InstanceDescription) -> None:
        """Check a newly accepted instance against all accepted earlier."""
        self._accepted[expected.index] = expected, description
        for other in list(self._accepted):
            for sender, receiver in ((expected.index, other), (other, expected.index)):
                self._check(sender, receiver)

    def forget(self, index: int) -> None:
        """Drop the pairs of an instance that left."""
        self._accepted.pop(index, None)
        self._gaps = {pair: gap for pair, gap in self._gaps.items() if index not in pair}

    def gap(self, sender: int, receiver: int) -> KvGap | None:
        """Return why this pair cannot transfer KV; None if it may."""
        return self._gaps.get((sender, receiver))

    def gaps(self, living: Collection[int]) -> list[KvGap]:
        """Return the gaps between these instances, in table order."""
        return [self._gaps[pair] for pair in sorted(self._gaps) if pair[0] in living and pair[1] in living]

    def prove(self, sender: int, receiver: int) -> None:
        """Record that this pair of workers answers like its decode worker alone."""
        if (sender, receiver) in self._gaps and self._gaps[sender, receiver].kind in UNPROVEN:
            del self._gaps[sender, receiver]

    def disprove(self, sender: int, receiver: int, why: str, kind: GapKind = GapKind.DISPROVEN) -> None:
        """Record that it does not, or is not known to."""
        start, end = self._accepted[sender][0], self._accepted[receiver][0]
        text = f"{start.name} and {end.name} have not answered like {end.name} alone: {why}"
        self._gaps[sender, receiver] = KvGap(sender, receiver, text, kind)

    def _check(self, sender: int, receiver: int) -> None:
        (start, sending), (end, receiving) = self._accepted[sender], self._accepted[receiver]
        if start.role is not Role.PREFILL or end.role is not Role.DECODE:
            return
        if start.is_worker != end.is_worker:
            why = f"{start.name} and {end.name} are of different engines"
            self._gaps[sender, receiver] = KvGap(sender, receiver, why, GapKind.OTHER_ENGINE)
            return
        before, lacking = self._gaps.pop((sender, receiver), None), missing_transport(sending, receiving)
        if lacking is None and start.is_worker:
            self.disprove(sender, receiver, "not tried yet", GapKind.UNPROVEN)
            return
        if lacking is None:
            if before is not None:
                _log.info("kv_transport_found", prefill=start, decode=end)
            return
        have = f"{start.name} has {_names(sending)} and {end.name} has {_names(receiving)}"
        gap = self._gaps[sender, receiver] = KvGap(sender, receiver, f"they cannot transfer KV: {have}; {lacking}")
        if gap != before:
            hosts = ", ".join(sorted({one.host_id for side in (sending, receiving) for one in side.endpoints} - {""}))
            _log.warning("no_kv_transport", prefill=start, decode=end, reason=gap, hosts=hosts)


def missing_transport(sender: InstanceDescription, receiver: InstanceDescription) -> str | None:
    """Return why the two have no common KV transport; None if they may have one, or if one lists no endpoints. Pure.

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
