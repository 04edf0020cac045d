"""The cluster's gauges and counters, read from a view at every scrape."""

from collections.abc import Callable, Iterator

from prometheus_client.core import Metric

from scheduler.links.link_metrics import link_metrics
from scheduler.view import ClusterView
from telemetry.metric_families import Namespace, families
from telemetry.metric_table import CLUSTER, GAPS, LINKS
from wire.load import LOADS


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
        links = [((), link_metrics(view.instances, view.gaps))]
        yield from families(CLUSTER, Namespace.PDSERVE, [((), view)])
        yield from families(LINKS, Namespace.PDSERVE, links)
        yield from families(LOADS, Namespace.PDSERVE, loads, labels=("instance",))
        yield from families(GAPS, Namespace.PDSERVE, links)
