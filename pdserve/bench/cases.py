"""What is run, and the rates that follow from how long it took."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

PROMPT, OUT, PREFILL_PROMPT = 256, 64, 512
PREFILL_REQUESTS, DECODE_BATCHES, OFFLINE_REQUESTS = (1, 4), (1, 8, 32, 64), 32


@dataclass(frozen=True, slots=True)
class BenchRun:
    """So many requests at once, of random prompts, each to its full output."""

    requests: int
    prompt: int
    out: int


@dataclass(frozen=True, slots=True)
class BenchCase:
    """One row of the table: `run` is timed, and `before` too where its time is taken off."""

    measure: str
    run: BenchRun
    before: BenchRun | None = None

    @property
    def runs(self) -> tuple[BenchRun, ...]:
        """All that is timed, in order."""
        return (self.run,) if self.before is None else (self.before, self.run)

    @property
    def tokens(self) -> int:
        """Tokens that the rate counts."""
        if self.before is not None:
            return self.run.requests * (self.run.out - self.before.out)
        return self.run.requests * (self.run.prompt if self.run.out == 1 else self.run.out)


@dataclass(slots=True)
class Times:
    """Seconds of each run, round by round. Owned by whoever measures one contestant."""

    seconds: dict[BenchRun, list[float]] = field(default_factory=dict)

    def add(self, run: BenchRun, seconds: float) -> None:
        """Take one more measurement."""
        self.seconds.setdefault(run, []).append(seconds)

    def case_s(self, case: BenchCase) -> float:
        """Return the median seconds of a case; not above 0 where a disturbance hit what is taken off."""
        took = statistics.median(self.seconds[case.run])
        return took if case.before is None else took - statistics.median(self.seconds[case.before])

    def rate(self, case: BenchCase) -> float | None:
        """Return tokens a second; None where the times say nothing."""
        seconds = self.case_s(case)
        return case.tokens / seconds if seconds > 0 else None


def all_cases() -> tuple[BenchCase, ...]:
    """Return the table's rows: prefill, decode with the prefill's time taken off, and both together."""
    prefill = [BenchCase(f"prefill {n} x {PREFILL_PROMPT}", BenchRun(n, PREFILL_PROMPT, 1)) for n in PREFILL_REQUESTS]
    decode = [BenchCase(f"decode, batch {n}", BenchRun(n, PROMPT, OUT), BenchRun(n, PROMPT, 1)) for n in DECODE_BATCHES]
    offline = BenchCase(f"{OFFLINE_REQUESTS} x ({PROMPT} in, {OUT} out)", BenchRun(OFFLINE_REQUESTS, PROMPT, OUT))
    return (*prefill, *decode, offline)


def goals() -> Mapping[str, float]:
    """Return the least ratio to vLLM that is wanted of each row."""
    return {
        case.measure: 2.0 if case.measure in ("decode, batch 1", "decode, batch 8") else 1.5 for case in all_cases()
    }
