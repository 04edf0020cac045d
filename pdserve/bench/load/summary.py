"""The summary of one load."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pdserve.bench.load.percentiles import Spread, spread
from pdserve.bench.load.record import LoadRecord
from pdserve.bench.load.timeline import Timeline
from wire.errors import ConfigError

METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token after the first",
    "itl": "gap between pieces",
    "e2el": "whole request",
    "longest_gap": "longest gap of a request",
    "client_queue_time": "wait in this client",
}
GOALS = ("ttft", "tpot", "e2el", "longest_gap")


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a load; `spreads` in milliseconds, rates per second of the run."""

    duration_s: float
    completed: int
    failed: int
    unfinished: int
    input_tokens: int
    output_tokens: int
    good: int | None
    peak_output_tokens: float
    peak_requests: int
    spreads: Mapping[str, Spread]

    def rate(self, count: float) -> float:
        """Return `count` per second of the run."""
        return count / self.duration_s if self.duration_s > 0 else 0.0


def summarize(
    record: LoadRecord, metrics: Sequence[str], percents: Sequence[float], goals: Mapping[str, float]
) -> Summary:
    """Summarize the ended requests; `goals` are the maximum milliseconds of a good request."""
    lines = record.in_order
    whole = [line for line in lines if line.failure is None]
    return Summary(
        duration_s=record.duration_s,
        completed=len(whole),
        failed=len(lines) - len(whole),
        unfinished=record.unfinished,
        input_tokens=sum(line.input_len for line in whole),
        output_tokens=sum(line.output_len for line in whole),
        good=sum(is_good(line, goals) for line in whole) if goals else None,
        peak_output_tokens=peak_output_tokens(whole),
        peak_requests=peak_requests(lines, record.under_way.values()),
        spreads={name: spread([1000 * s for line in whole for s in times_s(line, name)], percents) for name in metrics},
    )


def times_s(line: Timeline, metric: str) -> Sequence[float]:
    """Return one request's values of a metric, in seconds."""
    match metric:
        case "ttft":
            return (line.ttft_s,)
        case "tpot":
            return () if line.tpot_s is None else (line.tpot_s,)
        case "itl":
            return line.itls_s
        case "e2el":
            return (line.e2el_s,)
        case "longest_gap":
            return (line.longest_gap_s,)
        case "client_queue_time":
            return (line.queue_s,)
        case _:
            raise ConfigError(f"there is no metric {metric!r}, only {', '.join(METRICS)}")


def is_good(line: Timeline, goals: Mapping[str, float]) -> bool:
    """Return whether a request meets every goal, in milliseconds; a goal for which it has no value counts as met."""
    return all(1000 * value <= goal for name, goal in goals.items() for value in times_s(line, name))


def peak_output_tokens(lines: Sequence[Timeline]) -> float:
    """Return the most output tokens in one second of the run, dividing an answer's tokens evenly among its pieces."""
    if not lines:
        return 0.0
    began_s = min(line.sent_s for line in lines)
    by_second: dict[int, float] = {}
    for line in lines:
        for piece_s in line.pieces_s:
            second = int(piece_s - began_s)
            by_second[second] = by_second.get(second, 0.0) + line.output_len / len(line.pieces_s)
    return max(by_second.values(), default=0.0)


def peak_requests(lines: Sequence[Timeline], sent_s: Iterable[float] = ()) -> int:
    """Return the maximum number of concurrent requests, including failed ones; those of `sent_s` never ended."""
    began = [(line.sent_s, 1) for line in lines] + [(at_s, 1) for at_s in sent_s]
    changes = sorted(began + [(line.end_s, -1) for line in lines])
    peak = now = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak
