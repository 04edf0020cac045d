"""A load's result as text."""

from collections.abc import Iterator, Mapping

from pdserve.bench.load.client_cpu import ClientCpu
from pdserve.bench.load.record import LoadRecord
from pdserve.bench.load.summary import METRICS, Summary
from pdserve.text_table import printable, text_table


def report(
    record: LoadRecord, summary: Summary, client: ClientCpu, goals: Mapping[str, float], *, pooled: bool = False
) -> Iterator[str]:
    """Yield the lines: outcomes, rates, times, and warnings.

    If nothing completed there are no rates and times, and for vectors (`pooled`) no output token rates: zeros would
    be meaningless.
    """
    requests = "request" if summary.completed == 1 else "requests"
    ended = [f"{summary.completed} {requests} completed", f"{summary.failed} failed"]
    if summary.unfinished:
        ended.append(f"{summary.unfinished} unfinished")
    yield f"{', '.join(ended)} in {summary.duration_s:.2f} s"
    yield from _errors(record)
    if not summary.completed:
        return
    yield ""
    yield from _rates(summary, goals, pooled)
    yield ""
    yield from _time_rows(summary)
    yield ""
    yield f"client: {client.share:.0%} of a core"
    if client.warning is not None:
        yield f"warning: {client.warning}"


def _errors(record: LoadRecord) -> Iterator[str]:
    for kind, count in record.errors().most_common():
        first = next(line.failure for line in record.in_order if line.failure and line.failure.kind == kind)
        yield printable(f"  {count} x {kind}, first: {first.message or 'no message'}")


def _rates(summary: Summary, goals: Mapping[str, float], pooled: bool) -> Iterator[str]:
    rows = [
        ["requests", f"{summary.rate(summary.completed):.2f} /s", f"at most {summary.peak_requests} at once"],
        ["input tokens", f"{summary.rate(summary.input_tokens):.1f} /s", f"{summary.input_tokens:,} in all"],
    ]
    if not pooled:
        best = f"{summary.peak_output_tokens:.0f} in the best second"
        in_all = f"{summary.output_tokens:,} in all, {best}"
        rows.append(["output tokens", f"{summary.rate(summary.output_tokens):.1f} /s", in_all])
    if summary.good is not None:
        kept = " ".join(f"{name}:{limit:g}" for name, limit in goals.items())
        share = summary.good / max(1, summary.completed + summary.failed)
        rows.append(["goodput", f"{summary.rate(summary.good):.2f} /s", f"{share:.0%} of the requests meet {kept}"])
    yield from text_table(("", "rate", ""), rows)


def _time_rows(summary: Summary) -> Iterator[str]:
    spreads = summary.spreads
    if not spreads:
        return
    percents = list(next(iter(spreads.values())).percentiles)
    rows = [
        [f"{name} ({METRICS[name]})", *(f"{value:.2f}" for value in (one.mean, one.std, *one.percentiles.values()))]
        for name, one in spreads.items()
    ]
    yield from text_table(("milliseconds", "mean", "std", *(f"p{percent:g}" for percent in percents)), rows)
