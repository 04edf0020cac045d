"""Milliseconds of Python per step: the engine thread's CPU time outside native calls.

The real model decodes a whole batch, so that Python runs with the CPU caches as the layers leave them; time in native
calls is subtracted. Only the first few tokens of the vocabulary can be chosen: what remains of torch's and numpy's
kernels is their call overhead. Prompts have different lengths, so that every step fills some of the blocks.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from engine.core import EngineCore
from wire.types import PromptState, SamplingParams

BATCH = 64
T = TypeVar("T")
_VOCABULARY, _SHORTEST, _LENGTHS, _OUTPUTS = 32, 64, 16, 32
CASES: Mapping[str, SamplingParams] = {
    "greedy": SamplingParams(_OUTPUTS, temperature=0.0),
    "sampled": SamplingParams(_OUTPUTS, temperature=0.8, top_p=0.9, seed=7),
    "logprobs": SamplingParams(_OUTPUTS, temperature=0.0, logprobs=5),
}
"""The measured cases, by their name in the table."""


def measure(name: str, batch: int = BATCH) -> str:
    """Return the name of a row."""
    return f"Python per step, batch {batch}, {name}"


def chosen(only: tuple[str, ...]) -> list[str]:
    """Return the cases whose row names contain one of `only`; all if that is empty."""
    return [name for name in CASES if not only or any(part in measure(name) for part in only)]


def python_ms(model: Any, params: SamplingParams, *, batch: int = BATCH) -> float:
    """Return the median over steps that decode `batch` sequences on native kernels."""
    core = EngineCore(model, max_num_seqs=batch, max_num_batched_tokens=8192, prefill_chunk_size=512)
    numbers = random.Random(0)
    for i in range(batch):
        ids = tuple(numbers.choices(range(_VOCABULARY), k=_SHORTEST + i % _LENGTHS))
        core.add(PromptState(str(i), str(i), ids, params))
    with _timed(model._fused) as native:
        steps = [spent for spent, num_prompts, num_tokens in _steps(core, native) if num_tokens == num_prompts == batch]
    return 1000 * statistics.median(steps)


def _steps(core: EngineCore, native: "_NativeTime") -> Iterator[tuple[float, int, int]]:
    """Run until idle; yield each step's seconds of Python, number of decoding sequences, and number of new tokens."""
    while core.has_work():
        load = core.load()
        native.seconds, began = 0.0, time.thread_time()
        result = core.step()
        spent = time.thread_time() - began - native.seconds
        yield spent, load.running if load.uncomputed_tokens == 0 else 0, len(result.tokens)


class _NativeTime:
    """Adds up the seconds of this thread inside native functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def of(self, call: Callable[..., T]) -> Callable[..., T]:
        """Return a timed version of the function."""

        def timed(*args: object) -> T:
            began = time.thread_time()
            returned = call(*args)
            self.seconds += time.thread_time() - began
            return returned

        return timed


@contextmanager
def _timed(fused: Any) -> Iterator[_NativeTime]:
    """Time a decoder's native functions in this block, and let it return the logits of a few tokens only."""
    native, weights, chooser = _NativeTime(), fused._weights, fused.chooser
    best, draw = chooser._best, chooser._draw
    timed = {name: native.of(getattr(weights.functions, name)) for name in ("run", "embed")}
    functions = replace(weights.functions, **timed)
    fused._weights = replace(weights, functions=functions, vocab_size=min(_VOCABULARY, weights.vocab_size))
    chooser._best, chooser._draw = native.of(best), native.of(draw)
    try:
        yield native
    finally:
        fused._weights, chooser._best, chooser._draw = weights, best, draw
