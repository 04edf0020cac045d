"""Made-up outcomes for tests."""

from pdserve.bench.pd.outcome import BenchOutcome
from pdserve.bench.pd.utilisation import Use


def made(
    contestant: str, ttft: float, tpot: float, gap: float, rate: float, *, load: str = "burst", failed: int = 0,
    use: Use | None = None,
) -> BenchOutcome:  # fmt: skip
    """Return an outcome with these figures."""
    figures = {
        "ttft_p50_ms": ttft, "ttft_p95_ms": ttft, "tpot_p50_ms": tpot, "longest_gap_p99_ms": gap,
        "output_tokens_per_s": rate,
    }  # fmt: skip
    return BenchOutcome(contestant, load, figures, failed, "HTTP 500: no" if failed else "", use)
