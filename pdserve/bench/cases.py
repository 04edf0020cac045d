"""The cases of the engine benchmark, and the rates computed from their times."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

PROMPT, OUT, PREFILL_PROMPT = 256, 64, 512
PREFILL_REQUESTS, DECODE_BATCHES, OFFLINE_REQUESTS = (1, 4), (1, 8, 32, 64), 32


@dataclass(frozen=True, slots=True)
class BenchRun:
    """A number of concurrent requests with random prompts, each generating its full output."""

    requests: int
    prompt: int
    out: int


@dataclass(frozen=True, slots=True)
class BenchCase:
    """One row of the table: the time of `run`, minus that of `before` if given."""

    measure: str
    run: BenchRun
    before: BenchRun | None = None

    @property
    def runs(self) -> tuple[BenchRun, ...]:
        """The timed runs, in order."""
        return (self.run,) if self.before is None else (self.before, self.run)

    @property
    def tokens(self) -> int:
        """The number of tokens for the rate."""
        if self.before is not None:
            return self.run.requests * (self.run.out - self.before.out)
        return self.run.requests * (self.run.prompt if self.run.out == 1 else self.run.out)


@dataclass(slots=True)
class Times:
    """Seconds of each run, round by round. Owned by the measurement of one contestant."""

    seconds: dict[BenchRun, list[float]] = field(default_factory=dict)

    def add(self, run: BenchRun, seconds: float) -> None:
        """Add a measurement."""
        self.seconds.setdefault(run, []).append(seconds)

    def case_s(self, case: BenchCase) -> float:
        """Return the median seconds of a case; 0 or less if `before` was disturbed."""
        took = statistics.median(self.seconds[case.run])
        return took if case.before is None else took - statistics.median(self.seconds[case.before])

    def rate(self, case: BenchCase) -> float | None:
        """Return tokens per second; None if the times are meaningless."""
        seconds = self.case_s(case)
        return case.tokens / seconds if seconds > 0 else None


def all_cases() -> tuple[BenchCase, ...]:
    """Return the table's rows: prefill, decode without the prefill's time, and both together."""
    prefill = [BenchCase(f"prefill {n} x {PREFILL_PROMPT}", BenchRun(n, PREFILL_PROMPT, 1)) for n in PREFILL_REQUESTS]
    decode = [BenchCase(f"decode, batch {n}", BenchRun(n, PROMPT, OUT), BenchRun(n, PROMPT, 1)) for n in DECODE_BATCHES]
    offline = BenchCase(f"{OFFLINE_REQUESTS} x ({PROMPT} in, {OUT} out)", BenchRun(OFFLINE_REQUESTS, PROMPT, OUT))
    return (*prefill, *decode, offline)


def goals() -> Mapping[str, float]:
    """Return each row's target ratio to vLLM."""
    return {
        case.measure: 2.0 if case.measure in ("decode, batch 1", "decode, batch 8") else 1.5 for case in all_cases()
    }
