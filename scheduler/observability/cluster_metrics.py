"""The cluster's gauges and counters, read from a view at every scrape."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric

from scheduler.links.metrics import gap_metric, link_metrics
from scheduler.view import ClusterView, InstanceView
from telemetry.metric_families import Namespace, families
from telemetry.metric_table import CLUSTER, LOADS


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
        loads = [((one.instance_id,), one.load) for one in view.instances if one.load is not None]
        yield from families(CLUSTER, Namespace.PDSERVE, [((), view)])
        yield _table(view)
        yield _agreement(view)
        yield _instances(view.instances)
        yield from link_metrics(view.instances)
        yield from families(LOADS, Namespace.PDSERVE, loads, labels=("instance",))
        yield gap_metric(view.gaps)


def _table(view: ClusterView) -> Metric:
    table = GaugeMetricFamily("pdserve_table_version", "The global table in use", labels=("digest",))
    table.add_metric((view.table.digest,), view.table.version)
    return table


def _agreement(view: ClusterView) -> Metric:
    agrees = GaugeMetricFamily("pdserve_table_agrees", "1 if the instance uses the current table", labels=("instance",))
    for one in view.instances:
        if one.load is not None:
            agrees.add_metric((one.instance_id,), int(one.table_digest == view.table.digest))
    return agrees


def _instances(instances: Sequence[InstanceView]) -> Metric:
    info = GaugeMetricFamily(
        "pdserve_instance_info", "Instances of the table",
        labels=("instance", "name", "role", "address", "state", "kv_digests"),
    )  # fmt: skip
    for one in instances:
        info.add_metric((one.instance_id, one.name, one.role.value, one.address, one.state, one.kv_digests), 1)
    return info
