"""The cluster's gauges and counters, read from a view at every scrape."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from scheduler.links.metrics import gap_metric, link_metrics
from scheduler.view import ClusterView, InstanceView, LedgerView
from wire.types import LoadSnapshot

_GAUGES: tuple[tuple[str, str, Callable[[LoadSnapshot], float]], ...] = (
    ("kv_blocks_used", "KV blocks used by sequences and tickets", lambda load: load.blocks_used - load.blocks_probe),
    ("kv_blocks_cached", "KV blocks with a reusable prefix", lambda load: load.blocks_cached),
    ("kv_blocks_swapped", "KV blocks of preempted prompts swapped out of the pool", lambda load: load.blocks_swapped),
    ("kv_blocks_total", "KV blocks of the pool", lambda load: load.blocks_total),
    ("kv_blocks_probe", "KV blocks used by probes", lambda load: load.blocks_probe),
    ("running", "Sequences in the batch", lambda load: load.running),
    ("waiting", "Sequences waiting in the instance", lambda load: load.waiting),
    ("held_prompts", "Prefilled prompts whose KV is not yet handed off", lambda load: load.held_prompts),
    ("uncomputed_tokens", "Prompt tokens accepted and not yet computed", lambda load: load.uncomputed_tokens),
    ("progress_age_seconds", "Time since the engine last made progress", lambda load: load.progress_age_s),
    ("slowest_turn_seconds", "Longest recent time between two signs of progress", lambda load: load.slowest_turn_s),
)
_COUNTERS: tuple[tuple[str, str, Callable[[LoadSnapshot], float]], ...] = (
    ("kv_bytes_sent", "KV bytes sent by the instance", lambda load: load.kv_bytes_sent),
    ("kv_bytes_received", "KV bytes received by the instance", lambda load: load.kv_bytes_received),
    ("kv_frames_corrupt", "KV frames with a wrong digest", lambda load: load.kv_frames_corrupt),
    ("kv_frames_resent", "KV frames sent a second time", lambda load: load.kv_frames_resent),
    ("kv_frames_dropped", "KV frames without a valid ticket", lambda load: load.kv_frames_dropped),
    ("kv_frames_duplicate", "KV frames that had already arrived", lambda load: load.kv_frames_duplicate),
    ("kv_links_refused", "KV links that the instance refused", lambda load: load.kv_links_refused),
    ("preemptions", "Prompts preempted for lack of blocks", lambda load: load.preemptions),
    ("prefix_tokens_sought", "Tokens looked up in the prefix cache", lambda load: load.prefix_tokens_sought),
    ("prefix_tokens_found", "Tokens found in the prefix cache", lambda load: load.prefix_tokens_found),
    ("steps", "Steps of the instance", lambda load: load.steps),
    ("step_seconds", "Seconds spent in its steps", lambda load: load.step_seconds),
    ("tokens_computed", "Tokens computed by its model", lambda load: load.tokens_computed),
    ("starved_seconds", "Time for which the machine kept the instance from running", lambda load: load.starved_s),
)
_LEDGER: tuple[tuple[str, str, Callable[[LedgerView], float]], ...] = (
    ("requests_received", "Requests accepted", lambda ledger: ledger.received),
    ("requests_completed", "Requests that finished", lambda ledger: ledger.completed),
    ("requests_failed", "Requests that failed", lambda ledger: ledger.failed),
    ("requests_cancelled", "Requests cancelled because the client disconnected", lambda ledger: ledger.cancelled),
    ("requests_rejected", "Requests never accepted", lambda ledger: ledger.rejected),
    ("prompts_retried", "Prompts tried a second time", lambda ledger: ledger.retried_prompts),
    ("retries_delayed", "Retries delayed by the retry budget", lambda ledger: ledger.delayed_retries),
)


class ClusterCollector:
    """Turns a view into metrics at every scrape."""

    def __init__(self, view: Callable[[], ClusterView]) -> None:
        self._view = view

    def describe(self) -> list[Metric]:
        """Return nothing: registering must not read the view."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        view = self._view()
        yield from _scheduler_metrics(view)
        yield _agreement(view)
        yield from _instance_metrics(view.instances)
        yield gap_metric(view.gaps)


def _scheduler_metrics(view: ClusterView) -> Iterator[Metric]:
    for name, help, value in _LEDGER:
        yield CounterMetricFamily(f"pdserve_{name}", help, value=value(view.ledger))
    gauges = (
        ("requests_inflight", "Requests accepted and not finished", view.ledger.inflight),
        ("queued_prompts", "Prompts waiting in the scheduler", view.queued_prompts),
        ("queued_tokens", "Prompt tokens waiting in the scheduler", view.queued_tokens),
        ("retries_inflight", "Retries running against the retry budget", view.retries.under_way),
        ("retries_waiting", "Retries waiting for the retry budget", view.retries.waiting),
        ("retries_limit", "Current limit of concurrent retries", view.retries.limit),
        ("ready", "1 if a request would be served now", int(view.ready)),
    )
    for name, help, number in gauges:
        yield GaugeMetricFamily(f"pdserve_{name}", help, value=number)
    table = GaugeMetricFamily("pdserve_table_version", "The global table in use", labels=("digest",))
    table.add_metric((view.table.digest,), view.table.version)
    yield table


def _agreement(view: ClusterView) -> Metric:
    agrees = GaugeMetricFamily("pdserve_table_agrees", "1 if the instance uses the current table", labels=("instance",))
    for one in view.instances:
        if one.load is not None:
            agrees.add_metric((one.instance_id,), int(one.table_digest == view.table.digest))
    return agrees


def _instance_metrics(instances: Sequence[InstanceView]) -> Iterator[Metric]:
    info = GaugeMetricFamily(
        "pdserve_instance_info", "Instances of the table",
        labels=("instance", "name", "role", "address", "state", "kv_digests"),
    )  # fmt: skip
    for one in instances:
        info.add_metric((one.instance_id, one.name, one.role.value, one.address, one.state, one.kv_digests), 1)
    yield info
    yield from link_metrics(instances)
    for kind, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        for name, help, value in table:
            family = kind(f"pdserve_{name}", help, labels=("instance",))
            for one in instances:
                if one.load is not None:
                    family.add_metric((one.instance_id,), value(one.load))
            yield family
