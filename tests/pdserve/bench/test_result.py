"""A result has the keys of vLLM's `bench serve`, and there is a report to read."""

import io

import pytest

from pdserve.bench.load.client_cpu import ClientCpu
from pdserve.bench.load.progress_line import LiveLine
from pdserve.bench.load.report import report
from pdserve.bench.load.result import measured
from pdserve.bench.load.summary import summarize
from pdserve.bench.load.timeline import RequestFailure
from tests.pdserve.bench.timelines import made, record_of

METRICS = ("ttft", "tpot", "itl", "e2el", "longest_gap")
# What `vllm bench serve --save-detailed` of vLLM 0.32 measures, without what only its own engine has.
VLLM_KEYS = {
    "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
    "request_goodput", "output_throughput", "total_token_throughput", "input_lens", "output_lens", "ttfts", "itls",
    "latencies", "start_times", "queue_times", "generated_texts", "errors", "max_output_tokens_per_s",
    "max_concurrent_requests", "rtfx",
} | {
    f"{figure}_{name}_ms" for figure in ("mean", "median", "std", "p99", "p99.9")
    for name in ("ttft", "tpot", "itl", "e2el")
}  # fmt: skip
RECORD = record_of(
    [
        made(0.0, [0.5, 0.25], output_len=4, text="one"),
        made(1.0, [2.0], output_len=1, text="two"),
        made(1.0, [], failure=RequestFailure("HTTP 429", "the queue\n is full")),
    ],
    num_requests=4,
)


def test_a_detailed_result_has_vllms_keys_and_figures() -> None:
    found = measured(
        RECORD, summarize(RECORD, METRICS, (99.0, 99.9), {"ttft": 600}), ClientCpu(0.3, 3.0), detailed=True
    )

    assert set(found) >= VLLM_KEYS
    assert (found["completed"], found["failed"], found["unfinished"]) == (2, 1, 1)
    assert found["ttfts"] == [0.5, 2.0, 0.0]
    assert found["itls"] == [[0.25], [], []]
    assert found["output_lens"] == [4, 1, 0]
    assert found["generated_texts"][:2] == ["one", "two"]
    assert found["errors"] == ["", "", "HTTP 429: the queue\n is full"]
    assert found["error_counts"] == {"HTTP 429": 1}
    assert found["output_throughput"] == pytest.approx(5 / 3.0)
    assert found["request_goodput"] == pytest.approx(1 / 3.0)
    assert found["mean_ttft_ms"] == pytest.approx(1250.0)
    assert found["p99.9_longest_gap_ms"] == pytest.approx(249.75)
    assert found["client_cpu_share"] == pytest.approx(0.1)


def test_without_detail_lists_of_requests_are_left_out() -> None:
    found = measured(RECORD, summarize(RECORD, METRICS, (99.0,), {}), ClientCpu(0.3, 3.0), detailed=False)

    assert not {"ttfts", "itls", "generated_texts", "errors", "input_lens", "output_lens"} & set(found)
    assert found["request_goodput"] is None
    assert found["error_counts"] == {"HTTP 429": 1}


def test_the_report_lists_errors_by_kind_and_a_busy_client() -> None:
    goals = {"ttft": 600.0}
    lines = list(report(RECORD, summarize(RECORD, METRICS, (50.0, 99.0), goals), ClientCpu(2.7, 3.0), goals))

    assert lines[0] == "2 requests completed, 1 failed, 1 unfinished in 3.00 s"
    assert lines[1] == "  1 x HTTP 429, first: the queue? is full"
    assert any(line.startswith("goodput") and "33% of the requests meet ttft:600" in line for line in lines)
    (ttft,) = [line for line in lines if line.startswith("ttft (time to first token)")]
    assert ttft.split()[-4:] == ["1250.00", "750.00", "1250.00", "1985.00"]
    assert lines[-1].startswith("warning: this client used 90% of a core")


def test_if_nothing_completed_the_report_has_no_table_of_zeros() -> None:
    failed = record_of([made(0.0, [], failure=RequestFailure("HTTP 404", "no such model"))], num_requests=2)

    lines = list(report(failed, summarize(failed, METRICS, (50.0,), {"ttft": 1.0}), ClientCpu(0.1, 3.0), {"ttft": 1.0}))

    assert lines[0].startswith("0 requests completed, 1 failed, 1 unfinished in ")
    assert lines[1:] == ["  1 x HTTP 404, first: no such model"]


def test_an_idle_client_causes_no_warning() -> None:
    assert ClientCpu(0.8, 1.0).warning is None
    assert ClientCpu(0.0, 0.0).share == 0.0


def test_the_live_line_shows_errors_rate_and_median_ttft() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    live = LiveLine(4, shown=True, file=terminal)
    partial = record_of([])
    for number, line in RECORD.lines.items():
        partial.add(number, line, line.end_s)
        live.see(partial)

    assert live.text(2.5) == "errors: 1, 2 tok/s, p50 TTFT 1250 ms"
    live.close()
    assert "0/4" in terminal.getvalue()


def test_without_a_terminal_there_is_no_live_line() -> None:
    plain = io.StringIO()
    live = LiveLine(4, shown=True, file=plain)
    live.see(RECORD)
    live.close()

    assert plain.getvalue() == ""


def test_vectors_have_no_row_of_output_tokens() -> None:
    summary = summarize(RECORD, ["e2el"], (50.0, 99.0), {})
    reported = [list(report(RECORD, summary, ClientCpu(2.7, 3.0), {}, pooled=pooled)) for pooled in (False, True)]

    rows = [[line.split("  ")[0] for line in lines] for lines in reported]
    assert [row for row in rows[0] if row not in rows[1]] == ["output tokens"]
