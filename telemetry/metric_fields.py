"""Metrics declared at the fields of a dataclass: an instance's LoadSnapshot (wire/load.py).

    blocks_cached: int = gauge("KV blocks with a reusable prefix", "kv_blocks_cached")

is `pdserve_kv_blocks_cached` on the scheduler's page, `pdserve_instance_blocks_cached` on the instance's own.
"""

from dataclasses import field, fields
from functools import partial
from typing import Any

from telemetry.metric_table import Exposed, MetricKind, MetricRow


def _metric_field(kind: MetricKind, help: str, name: str | None = None, *, vllm: str | None = None) -> Any:
    """Declare a field, 0 by default; `name` is for the scheduler's page (default: the field's), `vllm` for vLLM's."""
    return field(default=0, metadata={"metric": (kind, help, name, vllm)})


gauge, counter = partial(_metric_field, MetricKind.GAUGE), partial(_metric_field, MetricKind.COUNTER)


def metrics_of(record: type[Any]) -> tuple[MetricRow, ...]:
    """Return the metrics of a dataclass's fields, in their order; an instance's own page has the fields' names."""
    found = ((one.name, *one.metadata["metric"]) for one in fields(record) if "metric" in one.metadata)
    return tuple(
        MetricRow(kind, source, Exposed(name or source, help), vllm and Exposed(vllm, help), Exposed(source, help))
        for source, kind, help, name, vllm in found
    )
