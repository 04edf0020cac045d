"""Metrics declared at the fields of a dataclass: LoadSnapshot (wire/types.py), of an instance.

    blocks_cached: int = gauge("KV blocks with a reusable prefix", "kv_blocks_cached")

is `pdserve_kv_blocks_cached` on the scheduler's page, `pdserve_instance_blocks_cached` on the instance's own.
"""

from dataclasses import field, fields
from typing import Any

from telemetry.metric_table import Exposed, MetricKind, MetricRow

_METADATA = "metric"


def gauge(help: str, name: str | None = None, *, vllm: Exposed | None = None) -> Any:
    """Declare a field, 0 by default, that is a gauge; `name` is that of the scheduler's page, None: the field's."""
    return field(default=0, metadata={_METADATA: (MetricKind.GAUGE, help, name, vllm)})


def counter(help: str, name: str | None = None, *, vllm: Exposed | None = None) -> Any:
    """Declare a field, 0 by default, that is a counter; `name` is that of the scheduler's page, None: the field's."""
    return field(default=0, metadata={_METADATA: (MetricKind.COUNTER, help, name, vllm)})


def metrics_of(record: type[Any]) -> tuple[MetricRow, ...]:
    """Return the metrics of a dataclass's fields, in their order; an instance's own page has the fields' names."""
    found = ((one.name, *one.metadata[_METADATA]) for one in fields(record) if _METADATA in one.metadata)
    return tuple(
        MetricRow(kind, source, Exposed(name or source, help), vllm, Exposed(source, help))
        for source, kind, help, name, vllm in found
    )
