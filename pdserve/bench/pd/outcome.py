"""The outcome of one load for one contestant."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdserve.bench.load.percentiles import percentile
from pdserve.bench.load.timeline import Timeline
from pdserve.bench.pd.loads import Load, Sent
from pdserve.bench.pd.utilisation import Use


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure: its JSON key, title and description, and whether more is better."""

    key: str
    title: str
    description: str
    more_is_better: bool = False


FIGURES = (
    Figure("ttft_p50_ms", "TTFT p50", "first token"),
    Figure("ttft_p95_ms", "TTFT p95", "slowest first tokens"),
    Figure("tpot_p50_ms", "TPOT p50", "time per token"),
    Figure("longest_gap_p99_ms", "longest gap p99", "longest gap"),
    Figure("output_tokens_per_s", "out tok/s", "output tokens per second", more_is_better=True),
)


@dataclass(frozen=True, slots=True)
class BenchOutcome:
    """Figures by key, or a failure message; only pdserve's contestants have `use`."""

    contestant: str
    load: str
    figures: dict[str, float]
    failed: int = 0
    failure: str = ""
    use: Use | None = None
    client_share: float = 0.0


def outcome(contestant: str, load: Load, sent: Sent, use: Use | None, client_share: float) -> BenchOutcome:
    """Compute the figures of a load: TTFT of the requests, gaps of the watched ones only, tokens of all."""
    timelines = sent.record.in_order
    whole = [each for each in timelines if each.failure is None]
    failures = [str(each.failure) for each in timelines if each.failure is not None]
    watched = [each for each in sent.watched if each.failure is None]
    first = [each for each in timelines[len(sent.watched) :] if each.failure is None] if load.streams else whole
    duration_s = sent.record.duration_s
    figures = {
        "ttft_p50_ms": _ms([each.ttft_s for each in first], 50),
        "ttft_p95_ms": _ms([each.ttft_s for each in first], 95),
        "tpot_p50_ms": _ms([each.tpot_s for each in watched if each.tpot_s is not None], 50),
        "longest_gap_p99_ms": _ms([each.longest_gap_s for each in watched], 99),
        "output_tokens_per_s": _tokens(whole) / duration_s if duration_s > 0 else 0.0,
    }
    message = failures[0] if failures else ""
    return BenchOutcome(contestant, load.name, figures, len(failures), message, use, client_share)


def medians(outcomes: Sequence[BenchOutcome]) -> list[BenchOutcome]:
    """Return one outcome for each contestant and load, in order: medians of figures and use over the rounds."""
    rounds: dict[tuple[str, str], list[BenchOutcome]] = {}
    for one in outcomes:
        rounds.setdefault((one.contestant, one.load), []).append(one)
    return [_median(each) for each in rounds.values()]


def _median(rounds: Sequence[BenchOutcome]) -> BenchOutcome:
    first = rounds[0]
    return BenchOutcome(
        first.contestant,
        first.load,
        {key: statistics.median(one.figures[key] for one in rounds) for key in first.figures},
        sum(one.failed for one in rounds),
        next((one.failure for one in rounds if one.failure), ""),
        _median_use([one.use for one in rounds if one.use is not None]),
        max(one.client_share for one in rounds),
    )


def _median_use(uses: Sequence[Use]) -> Use | None:
    if not uses:
        return None
    busy = {name: statistics.median(use.busy.get(name, 0.0) for use in uses) for name in uses[0].busy}
    return Use(
        busy,
        sum(use.hops for use in uses),
        _median_of(use.hop_ms for use in uses),
        _median_of(use.hop_bytes for use in uses),
    )


def _median_of(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _ms(values_s: Sequence[float], percent: float) -> float:
    return 1000 * percentile(values_s, percent)


def _tokens(lines: Sequence[Timeline]) -> int:
    return sum(line.output_len for line in lines)
