"""The header in which an answer reports the cluster's load to a proxy that requests the report (ORCA, as in vLLM)."""

import json
from collections.abc import Callable

from scheduler.view import ClusterView

REQUEST_HEADER, ANSWER_HEADER = b"endpoint-load-metrics-format", b"endpoint-load-metrics"


def report_of(form: str, view: Callable[[], ClusterView]) -> Callable[[], str] | None:
    """Return the function that formats the header's value when an answer starts, None for an unknown format."""
    if form.upper() == "TEXT":
        return lambda: "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in _metrics(view()).items())
    if form.upper() == "JSON":
        return lambda: "JSON " + json.dumps({"named_metrics": _metrics(view())})
    return None


def _metrics(view: ClusterView) -> dict[str, float]:
    """Return the load of all instances, named as in vLLM; prompts in the scheduler's queue count as waiting too."""
    loads = [one.load for one in view.instances if one.load is not None]
    used, blocks = sum(load.blocks_in_use for load in loads), sum(load.blocks_total for load in loads)
    waiting = view.queued_prompts + sum(load.waiting for load in loads)
    return {"kv_cache_usage_perc": round(used / blocks, 4) if blocks else 0.0, "num_requests_waiting": waiting}
