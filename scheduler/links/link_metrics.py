"""The metrics of KV links, read from a view at every scrape; one set per pair of instances."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler.view import GapView, InstanceView
from wire.link_reasons import without_rates
from wire.load import LinkStatus

_MAX_REASON_CHARS = 160
_MAX_GAP_CHARS = 300
_Pair = tuple[str, str]
_PairTransport = tuple[str, str, str]


@dataclass(slots=True)
class LinkMetrics:
    """Metric values by the labels in telemetry/metric_table.py, for links and for pairs that cannot have one."""

    up: dict[_PairTransport, int] = field(default_factory=dict)
    round_trip_s: dict[_PairTransport, float] = field(default_factory=dict)
    bytes_per_s: dict[_PairTransport, float] = field(default_factory=dict)
    failures: dict[_Pair, int] = field(default_factory=dict)
    fallbacks: dict[_Pair, int] = field(default_factory=dict)
    passed_over: dict[tuple[str, ...], int] = field(default_factory=dict)
    impossible: dict[_PairTransport, int] = field(default_factory=dict)


def link_metrics(instances: Sequence[InstanceView], gaps: Sequence[GapView]) -> LinkMetrics:
    """Return the values that the sending instances report, and the pairs that cannot have a link."""
    found = LinkMetrics(impossible={(gap.sender, gap.receiver, gap.why[:_MAX_GAP_CHARS]): 1 for gap in gaps})
    for instance in instances:
        for peer, statuses in _by_peer(instance).items():
            pair, shown = (instance.instance_id, peer), statuses[-1]
            labels = (*pair, shown.transport)
            found.up[labels] = int(shown.state == "up")
            if shown.round_trip_s > 0:
                found.round_trip_s[labels] = shown.round_trip_s
            if shown.bytes_per_s > 0:
                found.bytes_per_s[labels] = shown.bytes_per_s
            found.failures[pair] = sum(status.failures for status in statuses)
            found.fallbacks[pair] = sum(status.fallbacks for status in statuses)
            found.passed_over |= {(*pair, transport, reason): 1 for transport, reason in _reasons(shown).items()}
    return found


def _by_peer(view: InstanceView) -> dict[str, list[LinkStatus]]:
    """Group links by peer: a restarted peer has two for a while, but metrics are unique; the one that is up is last."""
    by_peer: dict[str, list[LinkStatus]] = {}
    for status in view.load.links if view.load is not None else ():
        by_peer.setdefault(status.peer_id, []).append(status)
    return {peer: sorted(links, key=lambda status: status.state == "up") for peer, links in by_peer.items()}


def _reasons(status: LinkStatus) -> dict[str, str]:
    """Return the reason by transport, from texts such as `shm: another host`; rates are cut: each is a new series."""
    split = (text.partition(": ") for text in status.passed_over)
    reasons = ((transport, without_rates(reason)) for transport, _, reason in split)
    return {transport: " ".join(reason.split())[:_MAX_REASON_CHARS] for transport, reason in reasons}
