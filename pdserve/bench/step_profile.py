"""Profile a step: the whole step and, with native kernels, each operation.

Each operation of the program (native/layer.h) runs alone over all layers: the weights of small operations are
then in a cache, while in a whole step they come from memory. `cpu` counts only this thread's time: with --threads 1 it
is more reliable on a disturbed machine.
"""

import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from engine.fused.program import instructions
from engine.fused.structs import Operation
from engine.step import BatchSequence, SampleRow, StepBatch
from engine.step_metadata import build
from engine.step_output import make_output
from pdserve.bench.cases import DECODE_BATCHES, OUT, PREFILL_PROMPT, PROMPT
from wire.types import SamplingParams

_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
_TIMES = 5
_OPERATIONS = (Operation.ENTER, Operation.ATTEND, Operation.OUT, Operation.MLP)


@torch.inference_mode()
def profile(model: Any, say: Callable[..., None]) -> None:
    """Print the milliseconds of each part, the best of a few, for decode at every batch size and one prefill."""
    steps = [(f"decode, batch {n}", n, PROMPT + OUT // 2, 1) for n in DECODE_BATCHES]
    for clock in (time.perf_counter, time.thread_time):
        for name, requests, start, count in (*steps, (f"prefill 1 x {PREFILL_PROMPT}", 1, 0, PREFILL_PROMPT)):
            batch = _batch(model, requests, start, count)
            parts = {part: _best_ms(call, clock) for part, call in _timed_parts(model, batch)}
            say(measure=name, clock="wall" if clock is time.perf_counter else "cpu", unit="ms", **parts)


def _timed_parts(model: Any, batch: StepBatch) -> Iterator[tuple[str, Callable[[], object]]]:
    yield "step", lambda: model.launch(batch)
    fused, layout = model._fused, model.info.layout
    if fused is None:  # transformers runs the model
        return

    def metadata() -> Any:
        return build(batch, block_size=layout.block_size, device=torch.device("cpu"))

    step = metadata()
    logits = fused.run(step).clone()
    yield "metadata", metadata
    for operation in _OPERATIONS:
        program = instructions([(operation, layer) for layer in range(layout.num_layers)])
        yield operation.name.lower(), partial(fused._call, program)
    yield "head", lambda: fused.logits(step.packed.sample_rows)
    yield "sample", lambda: make_output(logits, batch, chooser=fused.chooser)


def _batch(model: Any, requests: int, start: int, count: int) -> StepBatch:
    """Return a step of `requests` sequences after `start` tokens each, with random blocks."""
    layout, numbers = model.info.layout, random.Random(0)
    free = list(range(layout.num_blocks))
    numbers.shuffle(free)
    each = -(-(start + count) // layout.block_size)
    tables = [tuple(free[i * each : (i + 1) * each]) for i in range(requests)]
    ids = tuple(numbers.choices(range(100, min(40_000, model.info.vocab_size)), k=requests * count))
    samples = tuple(SampleRow((i + 1) * count - 1, _GREEDY, 0, 0) for i in range(requests))
    return StepBatch(ids, tuple(BatchSequence(start, count, table) for table in tables), samples)


def _best_ms(call: Callable[[], object], clock: Callable[[], float]) -> float:
    call()
    shortest = float("inf")
    for _ in range(_TIMES):
        began = clock()
        call()
        shortest = min(shortest, clock() - began)
    return 1000 * shortest
