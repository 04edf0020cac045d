"""pdserve's engine as a contestant: one EngineCore, random prompts, greedy, no end of sequence, no prefix cache."""

import random
import time
from typing import Any

from engine.core import EngineCore
from pdserve.bench.cases import BenchRun
from wire.types import PromptState, SamplingParams

MAX_SEQUENCES = 64
"""The maximum number of sequences in a step."""


class OwnEngine:
    """One engine in this process."""

    name = "pdserve"

    def __init__(self, model: Any, chunk: int) -> None:
        self.core = EngineCore(
            model,
            max_num_seqs=MAX_SEQUENCES,
            max_num_batched_tokens=8192,
            prefill_chunk_size=chunk,
            prefix_caching=False,
        )
        self._rng, self._added = random.Random(0), 0
        self.full_steps_s: dict[int, list[float]] = {}  # durations of steps that decode a whole batch, by batch size

    def add(self, run: BenchRun) -> None:
        """Queue random prompts."""
        vocabulary = range(100, min(40_000, self.core.info.vocab_size))
        for _ in range(run.requests):
            self._added += 1
            ids = tuple(self._rng.choices(vocabulary, k=run.prompt))
            name = f"bench-{self._added}"
            self.core.add(PromptState(name, name, ids, SamplingParams(max_tokens=run.out, temperature=0.0)))

    def time(self, run: BenchRun) -> float:
        """Return the seconds until all requests have finished."""
        self.add(run)
        steps = self.full_steps_s.setdefault(run.requests, [])
        began, tokens = time.perf_counter(), 0
        while self.core.has_work():
            load = self.core.load()
            result = self.core.step()
            tokens += len(result.tokens)
            if load.running == run.requests and load.uncomputed_tokens == 0:
                steps.append(result.seconds)
        assert tokens == run.requests * run.out, f"{tokens} tokens instead of {run.requests * run.out}"
        return time.perf_counter() - began

    def close(self) -> None:
        """Free the pool."""
        self.core.close()
