"""Timings of our engine's steps: decoding after a context, and prefill of several prompts at once."""

import gc
from collections import deque
from collections.abc import Iterator

from benchmarks.card.limits import Limits
from benchmarks.card.model import make_model
from benchmarks.card.rows import Row, seconds_of
from benchmarks.card.shapes import Shape
from devices.interface import Device
from engine.step import BatchSequence, PendingStep, SampleRow, StepBatch
from engine.torch_model import TorchModel
from wire.types import SamplingParams

DECODE_GOAL, PREFILL_GOAL = 0.70, 0.60
_STEPS = 16
"""Decode steps timed together; two in a smoke run."""
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def measure_steps(shape: Shape, device: Device, limits: Limits, *, rounds: int, judged: bool) -> Iterator[Row]:
    """Yield the rows of one shape, with graphs if the device captures them, and without. Goals apply if `judged`."""
    for most_rows in (max(shape.batches), 0) if device.captures_graphs else (0,):
        model, note = make_model(shape, device, most_rows=most_rows)
        is_best = most_rows > 0 or not device.captures_graphs
        steps = _STEPS if judged else 2
        for batch in shape.batches:
            goal = DECODE_GOAL if judged and is_best and batch == 1 else None
            seconds = _decode_s(model, shape, device, batch, rounds, steps)
            yield decode_row(shape, "pdserve", seconds, batch, limits, goal, note)
        if is_best:
            goal = PREFILL_GOAL if judged else None
            yield prefill_row(shape, "pdserve", _prefill_s(model, shape, device, rounds), limits, goal, note)
        model.close()
        del model
        gc.collect()  # the network's modules form reference cycles


def decode_row(
    shape: Shape, who: str, seconds: float, batch: int, limits: Limits, goal: float | None, note: str
) -> Row:  # fmt: skip
    """Return the row of a decode step: the fewest bytes that the step must read, per second."""
    step, tokens_s = f"step {seconds * 1e3:.3g} ms", f"{batch / seconds:,.0f} tokens/s"
    return Row(
        f"{shape.name} decode, batch {batch}, context {shape.context}", who, shape.decode_bytes(batch) / seconds / 1e9,
        "GB/s", limits.read_bytes_s / 1e9, limits.name, goal, f"{step}, {tokens_s}; {note}",
    )  # fmt: skip


def prefill_row(
    shape: Shape, who: str, seconds: float, limits: Limits, goal: float | None, note: str
) -> Row:  # fmt: skip
    """Return the row of a prefill: its operations per second."""
    tokens_s = f"{shape.prompts * shape.prompt_tokens / seconds:,.0f} tokens/s"
    return Row(
        f"{shape.name} prefill, {shape.prompts} x {shape.prompt_tokens}", who,
        shape.prefill_operations() / seconds / 1e12, "TFLOP/s", limits.operations_s / 1e12, limits.name, goal,
        f"{seconds * 1e3:.4g} ms, {tokens_s}; {note}",
    )  # fmt: skip


def _decode_s(model: TorchModel, shape: Shape, device: Device, batch: int, rounds: int, steps: int) -> float:
    """Return the mean seconds of `steps` steps; all sequences stay `context` tokens long.

    If the model runs ahead, each step is launched before the previous one is collected, as in the engine.
    """
    tables = _tables(model, batch, shape.context + 1)
    parts = tuple(BatchSequence(shape.context, 1, table) for table in tables)
    samples = tuple(SampleRow(row, _GREEDY, 0, 0) for row in range(batch))
    step = StepBatch((7,) * batch, parts, samples)

    def run() -> None:
        awaited: deque[PendingStep] = deque()
        for _ in range(steps):
            awaited.append(model.launch(step))
            if len(awaited) > model.runs_ahead:
                awaited.popleft().collect()
        while awaited:
            awaited.popleft().collect()

    return seconds_of(run, device.synchronize, rounds) / steps


def _prefill_s(model: TorchModel, shape: Shape, device: Device, rounds: int) -> float:
    tables, count = _tables(model, shape.prompts, shape.prompt_tokens), shape.prompt_tokens
    parts = tuple(BatchSequence(0, count, table) for table in tables)
    samples = tuple(SampleRow((row + 1) * count - 1, _GREEDY, 0, 0) for row in range(shape.prompts))
    ids = tuple(3 + at % (shape.vocab_size - 3) for at in range(shape.prompts * count))
    step = StepBatch(ids, parts, samples)
    return seconds_of(lambda: model.launch(step).collect(), device.synchronize, rounds)


def _tables(model: TorchModel, num_sequences: int, num_tokens: int) -> list[tuple[int, ...]]:
    """Assign blocks in turn, so that no sequence has adjacent ones."""
    count = model.info.layout.num_blocks_for(num_tokens)
    return [tuple(range(first, num_sequences * count, num_sequences)) for first in range(num_sequences)]
