"""A metrics page as objects."""

from pdserve.offline.metrics import Counter, Gauge, Histogram, read_metrics

PAGE = """\
# TYPE vllm:running gauge
vllm:running{model="a"} 3
# TYPE tokens_total counter
tokens_total{model="a"} 5
# TYPE tokens_created gauge
tokens_created{model="a"} 1.7e9
# TYPE wait_seconds histogram
wait_seconds_bucket{role="p",le="0.1"} 1
wait_seconds_bucket{role="p",le="+Inf"} 2
wait_seconds_count{role="p"} 2
wait_seconds_sum{role="p"} 0.5
wait_seconds_bucket{role="d",le="+Inf"} 7
wait_seconds_count{role="d"} 7
wait_seconds_sum{role="d"} 1.5
"""


def test_each_series_is_read_with_its_labels() -> None:
    assert read_metrics(PAGE) == [
        Gauge("vllm:running", {"model": "a"}, 3.0),
        Counter("tokens_total", {"model": "a"}, 5.0),
        Histogram("wait_seconds", {"role": "p"}, 2, 0.5, {"0.1": 1, "+Inf": 2}),
        Histogram("wait_seconds", {"role": "d"}, 7, 1.5, {"+Inf": 7}),
    ]
