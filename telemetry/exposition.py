"""Metrics in Prometheus' text format, version 0.0.4.

prometheus_client's own writer checks and escapes every name of every sample, which takes twice as long, on the thread
that serves requests. Our metric and label names are known to be valid, so only label values are escaped.
"""

import math
from collections.abc import Iterable

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

_KINDS = {"counter": "counter", "gauge": "gauge", "histogram": "histogram", "unknown": "untyped"}
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


def exposed(metrics: Iterable[Metric]) -> bytes:
    """Return the page. Raises KeyError for a metric type that is not in `_KINDS`."""
    lines: list[str] = []
    for metric in metrics:
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        help_text = metric.documentation.replace("\\", r"\\").replace("\n", r"\n")
        lines.append(f"# HELP {name} {help_text}\n# TYPE {name} {_KINDS[metric.type]}\n")
        lines.extend(map(_line, metric.samples))
    return "".join(lines).encode()


def _line(sample: Sample) -> str:
    if not sample.labels:
        return f"{sample.name} {_number(sample.value)}\n"
    labels = ",".join([f'{name}="{_escape(value)}"' for name, value in sorted(sample.labels.items())])
    return f"{sample.name}{{{labels}}} {_number(sample.value)}\n"


def _escape(value: str) -> str:
    return value if value.isalnum() else value.translate(_ESCAPES)


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
