"""The gauges and counters of KV links, read from a view at every scrape; one set per pair of instances."""

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from scheduler.view import GapView, InstanceView
from wire.types import LinkStatus

_PAIR = ("instance", "peer")
_OVER = (*_PAIR, "transport")
_MAX_REASON_CHARS = 160
_MAX_GAP_CHARS = 300


def link_metrics(instances: Sequence[InstanceView]) -> Iterator[Metric]:
    """Yield the link metrics reported by the sending instances."""
    up = GaugeMetricFamily("pdserve_link_up", "1 if the link is usable", labels=_OVER)
    round_trip = GaugeMetricFamily(
        "pdserve_link_round_trip_seconds", "Shortest round trip of the link's last measurement", labels=_OVER
    )
    bandwidth = GaugeMetricFamily(
        "pdserve_link_bandwidth_bytes_per_second", "Bandwidth of the link's last measurement", labels=_OVER
    )
    failures = CounterMetricFamily("pdserve_link_failures", "Links to the peer that were lost", labels=_PAIR)
    fallbacks = CounterMetricFamily(
        "pdserve_link_fallbacks", "Times that a worse transport had to be used towards the peer", labels=_PAIR
    )
    passed_over = GaugeMetricFamily(
        "pdserve_link_passed_over", "A better transport that is not in use now, and why", labels=(*_OVER, "reason")
    )
    for one in instances:
        for peer, statuses in _by_peer(one).items():
            pair, shown = (one.instance_id, peer), statuses[-1]
            over = (*pair, shown.transport)
            up.add_metric(over, int(shown.state == "up"))
            if shown.round_trip_s > 0:
                round_trip.add_metric(over, shown.round_trip_s)
            if shown.bytes_per_s > 0:
                bandwidth.add_metric(over, shown.bytes_per_s)
            failures.add_metric(pair, sum(status.failures for status in statuses))
            fallbacks.add_metric(pair, sum(status.fallbacks for status in statuses))
            for transport, reason in _reasons(shown).items():
                passed_over.add_metric((*pair, transport, reason), 1)
    yield from (up, round_trip, bandwidth, failures, fallbacks, passed_over)


def gap_metric(gaps: Sequence[GapView]) -> Metric:
    """Return the metric of pairs that cannot have a link."""
    family = GaugeMetricFamily(
        "pdserve_link_impossible", "1 for a pair without a common KV transport, and why", labels=(*_PAIR, "reason")
    )
    for gap in gaps:
        family.add_metric((gap.sender, gap.receiver, gap.why[:_MAX_GAP_CHARS]), 1)
    return family


def _by_peer(view: InstanceView) -> dict[str, list[LinkStatus]]:
    """Group links by peer: a restarted peer has two for a while, but metrics are unique; the one that is up is last."""
    by_peer: dict[str, list[LinkStatus]] = {}
    for status in view.load.links if view.load is not None else ():
        by_peer.setdefault(status.peer_id, []).append(status)
    return {peer: sorted(lives, key=lambda status: status.state == "up") for peer, lives in by_peer.items()}


def _reasons(status: LinkStatus) -> dict[str, str]:
    """Return the reason by transport, from texts such as `shm: another host`."""
    split = (text.partition(": ") for text in status.passed_over)
    return {transport: " ".join(reason.split())[:_MAX_REASON_CHARS] for transport, _, reason in split}
