"""The metrics page equals that of prometheus_client's own writer."""

import math
from collections.abc import Iterable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.parser import text_string_to_metric_families

from telemetry.exposition import exposed

HOSTILE = ("plain", "", 'say "hi"', "a\nb", "a\\b", "\\n", "你好", "a,b={}", "🙂")


def _families() -> list[Metric]:
    gauge = GaugeMetricFamily("pdserve_gauge", 'help with "quotes", a \\ and\na break', labels=("z", "a"))
    for number, text in enumerate(HOSTILE):
        gauge.add_metric((text, f"x{number}"), number + 0.5)
    histogram = HistogramMetricFamily("vllm:seconds", "times", labels=("engine",))
    histogram.add_metric(("0",), [("0.5", 1.0), ("+Inf", 3.0)], 1e17)
    counter = CounterMetricFamily("pdserve_counter", "count", value=2**60)
    extremes = GaugeMetricFamily("pdserve_extremes", "ends", labels=("of",))
    for value in (1e-12, 1e21, -3, math.inf, -math.inf):
        extremes.add_metric((str(value),), value)
    return [gauge, histogram, counter, extremes, GaugeMetricFamily("pdserve_none", "no samples", labels=("a",))]


class _Given:
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> list[Metric]:
        return self._metrics


def _read(page: bytes) -> list[tuple[Any, ...]]:
    return [
        (family.name, family.type, family.documentation, [(s.name, s.labels, s.value) for s in family.samples])
        for family in text_string_to_metric_families(page.decode())
    ]


def test_the_page_parses_like_that_of_prometheus_client() -> None:
    registry = CollectorRegistry()
    registry.register(_Given(_families()))

    page = exposed(_families())

    assert _read(page) == _read(generate_latest(registry))
    assert [line for line in page.decode().splitlines() if not line.startswith(("#", "pdserve_", "vllm:"))] == []


def test_a_nan_value_is_written_as_nan() -> None:
    assert b"pdserve_x NaN\n" in exposed([GaugeMetricFamily("pdserve_x", "x", value=math.nan)])


def test_an_unknown_metric_type_is_an_error() -> None:
    with pytest.raises(KeyError, match="info"):
        exposed([InfoMetricFamily("pdserve_x", "x", value={"a": "b"})])
