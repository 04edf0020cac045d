"""Counts between bucket boundaries agree with direct counting and with prometheus_client's histogram."""

import random

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as PrometheusHistogram

from telemetry.histogram import BucketHistogram


def test_buckets_are_those_of_prometheus_client() -> None:
    edges = (0.01, 0.1, 0.5, 1, 2.5)
    rng = random.Random(7)
    values = [*edges, *(rng.expovariate(1.0) for _ in range(500))]
    own = BucketHistogram(edges)
    registry = CollectorRegistry()
    theirs = PrometheusHistogram("h", "", registry=registry, buckets=edges)

    for value in values:
        own.observe(value)
        theirs.observe(value)

    for le, count in own.buckets():
        assert registry.get_sample_value("h_bucket", {"le": le}) == count
    assert registry.get_sample_value("h_sum") == pytest.approx(own.sum)
    assert registry.get_sample_value("h_count") == own.count == len(values)


def test_one_histogram_serves_several_sets_of_boundaries() -> None:
    histogram = BucketHistogram((1, 10), (2, 10, 20))

    for value in (0.5, 1.5, 9, 15, 99):
        histogram.observe(value)

    assert histogram.buckets((1, 10)) == [("1.0", 1), ("10.0", 3), ("+Inf", 5)]
    assert histogram.buckets((2, 10, 20)) == [("2.0", 2), ("10.0", 3), ("20.0", 4), ("+Inf", 5)]


def test_boundaries_it_was_not_made_with_are_refused() -> None:
    with pytest.raises(ValueError, match=r"3\.0 is not a bucket boundary"):
        BucketHistogram((1, 2)).buckets((1, 3))
