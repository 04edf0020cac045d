"""Describe which contestant wins, where and why, from the figures alone."""

from collections.abc import Iterator, Sequence

from pdserve.bench.pd.contestants import AUTO_PAIR, COLOCATED, PAIR, VLLM_COLOCATED, VLLM_PAIR
from pdserve.bench.pd.outcome import FIGURES, BenchOutcome, Figure

EVEN = 1.05
"""Figures whose ratio is below this count as even: two runs of one contestant can differ by more."""
_APART, _SATURATED = 0.2, 0.85  # shares of the time


def winner(figure: Figure, outcomes: Sequence[BenchOutcome]) -> tuple[str, float] | None:
    """Return the best contestant of a figure and its factor over the next; None if the two are even or it has no rival.

    Outcomes with failures do not compete.
    """
    whole = [one for one in outcomes if not one.failed and one.figures[figure.key] > 0]
    ordered = sorted(whole, key=lambda one: one.figures[figure.key], reverse=figure.more_is_better)
    if len(ordered) < 2:
        return None
    best, next_one = (one.figures[figure.key] for one in ordered[:2])
    ratio = best / next_one if figure.more_is_better else next_one / best
    return (ordered[0].contestant, ratio) if ratio >= EVEN else None


def where(outcomes: Sequence[BenchOutcome]) -> Iterator[str]:
    """Yield the figures that P/D and colocated each win, then how P/D compares with the others."""
    here = {one.contestant for one in outcomes}
    if {PAIR, COLOCATED} <= here:
        yield from _win_lines(outcomes, PAIR, COLOCATED)
    for other in (AUTO_PAIR, VLLM_PAIR, VLLM_COLOCATED):
        if {PAIR, other} <= here:
            won = [best for _, best in _compare_figures(outcomes, PAIR, other)]
            ours, theirs = sum(best == PAIR for best in won), sum(best == other for best in won)
            yield f"{PAIR} against {other}: better in {ours} of {len(won)} figures, worse in {theirs}, else even"


def _win_lines(outcomes: Sequence[BenchOutcome], one: str, other: str) -> Iterator[str]:
    contests = list(_compare_figures(outcomes, one, other))
    for name in (one, other):
        won = [text for text, best in contests if best == name]
        yield f"{name} wins {len(won)} of {len(contests)} figures{':' if won else ''}"
        yield from (f"  {text}" for text in won)


def _compare_figures(outcomes: Sequence[BenchOutcome], one: str, other: str) -> Iterator[tuple[str, str | None]]:
    """Yield a description with the factor, and the better of two contestants, for each load and figure."""
    for load in _load_names(outcomes):
        both = [each for each in outcomes if each.load == load and each.contestant in (one, other)]
        for figure in FIGURES:
            best = winner(figure, both)
            name, ratio = (None, 1.0) if best is None else best
            yield f"{figure.description}, {load}: {ratio:.2f}x", name


def why(outcomes: Sequence[BenchOutcome]) -> Iterator[str]:
    """Yield, for each load, which instances were busy and what that means."""
    for load in _load_names(outcomes):
        for one in outcomes:
            if one.load == load and one.use is not None and one.use.busy:
                yield f"{load}, {one.contestant}: {_busy_text(one)}{_hop_text(one)}"


def _busy_text(one: BenchOutcome) -> str:
    assert one.use is not None
    ordered = sorted(one.use.busy.items(), key=lambda pair: -pair[1])
    text = ", ".join(f"{name} {share:.0%} busy" for name, share in ordered)
    (busiest, high), (idlest, low) = ordered[0], ordered[-1]
    if high - low >= _APART and high >= _SATURATED:
        return f"{text}: {busiest} was the limit, and {(1 - low):.0%} of {idlest}'s time was idle"
    if high - low >= _APART:
        return f"{text}: {busiest} did more of the work, and neither was the limit"
    if low >= _SATURATED:
        return f"{text}: both were at their limit"
    return f"{text}: neither was the limit"


def _hop_text(one: BenchOutcome) -> str:
    use = one.use
    if use is None or use.hop_ms is None or use.hop_bytes is None:
        return ""
    return f"; a KV hop took {use.hop_ms:.1f} ms for {use.hop_bytes / 2**20:.1f} MiB"


def _load_names(outcomes: Sequence[BenchOutcome]) -> list[str]:
    return list(dict.fromkeys(one.load for one in outcomes))
