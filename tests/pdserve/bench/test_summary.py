"""The figures of a load are computed from its timelines."""

import statistics
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.bench.load.summary import METRICS, Summary, is_good, peak_output_tokens, peak_requests, summarize
from pdserve.bench.load.timeline import RequestFailure, Timeline
from tests.pdserve.bench.timelines import made, record_of
from wire.errors import ConfigError

_GAP = st.integers(0, 4_000).map(lambda ms: ms / 1000)
_LINE = st.builds(
    made, st.integers(0, 9_000).map(lambda ms: ms / 1000), st.lists(_GAP, min_size=1, max_size=9),
    output_len=st.integers(1, 90),
)  # fmt: skip


def summary(lines: list[Timeline], goals: dict[str, float] | None = None) -> Summary:
    return summarize(record_of(lines), list(METRICS), (50.0, 99.0), goals or {})


def test_each_time_is_what_its_name_says() -> None:
    line = made(10.0, [0.4, 0.1, 0.3], output_len=7, queue_s=2.0)

    assert line.ttft_s == pytest.approx(0.4)
    assert line.e2el_s == pytest.approx(0.8)
    assert line.tpot_s == pytest.approx(0.4 / 6)
    assert line.itls_s == pytest.approx((0.1, 0.3))
    assert line.longest_gap_s == pytest.approx(0.3)
    assert line.queue_s == pytest.approx(2.0)


def test_an_answer_of_one_token_has_no_time_per_token() -> None:
    line = made(0.0, [0.4], output_len=1)

    assert line.tpot_s is None
    assert is_good(line, {"tpot": 0.0, "ttft": 401.0})
    assert not is_good(line, {"tpot": 0.0, "ttft": 399.0})


@given(st.lists(_LINE, min_size=1, max_size=12))
def test_spreads_are_those_of_all_requests(lines: list[Timeline]) -> None:
    spreads = summary(lines).spreads

    gaps = [1000 * (b - a) for line in lines for a, b in pairwise(line.pieces_s)]
    longest = [max([1000 * (b - a) for a, b in pairwise(line.pieces_s)], default=0.0) for line in lines]
    tpots = [
        1000 * (line.pieces_s[-1] - line.pieces_s[0]) / (line.output_len - 1) for line in lines if line.output_len > 1
    ]
    for name, values in (("itl", gaps), ("longest_gap", longest), ("tpot", tpots)):
        assert spreads[name].mean == pytest.approx(statistics.fmean(values) if values else 0.0, abs=1e-6)
    assert spreads["ttft"].median == pytest.approx(
        statistics.median(1000 * (line.pieces_s[0] - line.sent_s) for line in lines), abs=1e-6
    )


@given(st.lists(_LINE, min_size=1, max_size=12), st.floats(0, 5_000), st.floats(0, 5_000))
def test_goodput_counts_requests_that_meet_every_goal(lines: list[Timeline], ttft: float, gap: float) -> None:
    found = summary(lines, {"ttft": ttft, "longest_gap": gap})

    assert found.good == sum(1000 * one.ttft_s <= ttft and 1000 * one.longest_gap_s <= gap for one in lines)


@given(st.lists(_LINE, min_size=1, max_size=12))
def test_the_peak_is_the_most_requests_that_overlap_at_some_start(lines: list[Timeline]) -> None:
    by_hand = max(sum(one.sent_s <= at.sent_s < one.end_s for one in lines) for at in lines)

    assert peak_requests(lines) == by_hand


def test_failed_and_unfinished_requests_count_as_in_flight() -> None:
    failed = made(0.0, [9.0], failure=RequestFailure("HTTP 500", "no"))
    record = record_of([made(0.0, [1.0]), failed], num_requests=9)
    for number, sent_s in ((2, 0.5), (3, 0.75), (4, 5.0)):
        record.start(number, sent_s)

    assert summarize(record, ["ttft"], (), {}).peak_requests == 4
    record.start(5, 6.0)
    assert summarize(record, ["ttft"], (), {}).peak_requests == 5


def test_tokens_of_a_chunk_are_counted_in_its_second() -> None:
    lines = [made(0.0, [0.2, 0.2, 1.0], output_len=9), made(0.0, [1.5], output_len=2)]

    assert peak_output_tokens(lines) == 6.0  # two of three pieces of nine tokens
    assert peak_output_tokens([]) == 0.0


def test_failures_are_counted_but_not_measured() -> None:
    failed = made(0.0, [9.0], failure=RequestFailure("HTTP 429", "full"))
    record = record_of([made(0.0, [1.0, 1.0], output_len=10), failed], num_requests=5)

    found = summarize(record, ["ttft"], (99.0,), {"ttft": 2000.0})

    assert (found.completed, found.failed, found.unfinished, found.good) == (1, 1, 3, 1)
    assert (found.input_tokens, found.output_tokens) == (5, 10)
    assert found.spreads["ttft"].percentiles == {99.0: 1000.0}
    assert found.rate(found.output_tokens) == pytest.approx(10 / 9.0)
    assert record.errors() == {"HTTP 429": 1}


def test_an_unknown_metric_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="no metric 'speed', only ttft"):
        summarize(record_of([made(0.0, [1.0])]), ["speed"], (), {})
