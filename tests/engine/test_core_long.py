"""A step costs the engine as much late in a long output as at its start: calls and memory, counted."""

import gc
import sys
import tracemalloc
from collections.abc import Callable

import pytest

from engine.core import EngineCore
from engine.step import StepBatch, StepOutput
from testing.engine.fake_model import Computed, FakeConfig, FakeModel
from wire.types import PromptState, SamplingParams, TokenLogprobs

_CONFIG = FakeConfig(salt=1, block_size=16, num_blocks=512, vocab_size=500, max_model_len=2100, eos_token_ids=())
_EARLY, _LATE, _PERIOD = 100, 1956, 16
_PARAMS = {
    "greedy": {},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5},
    "bad words": {"bad_words": ((3, 9), (4,)), "min_tokens": 2000, "stop_token_ids": (8,)},
    "logprobs": {"logprobs": 0},
}


class _Constant(FakeModel):
    """Chooses among ten tokens without reading the KV, whose cost grows with the output."""

    def launch(self, batch: StepBatch, layer_done: Callable[[int], None] | None = None) -> Computed:
        rows = batch.samples
        logprobs = [TokenLogprobs(-1.0, 1)] * len(rows) if rows and rows[0].params.logprobs is not None else ()
        return Computed(StepOutput([row.position % 10 for row in rows], logprobs))


@pytest.mark.parametrize("params", _PARAMS.values(), ids=_PARAMS.keys())
def test_a_late_step_calls_and_allocates_no_more_than_an_early_one(params: dict[str, object]) -> None:
    core = EngineCore(_Constant(_CONFIG), max_num_seqs=4, max_num_batched_tokens=256, prefill_chunk_size=64)
    requests = SamplingParams(2000, temperature=0.0, **params)  # type: ignore[arg-type]
    for name in "abcd":
        core.add(PromptState(name, name, (5,) * 20, requests))

    early = _cost_of_steps(core, _EARLY)
    late = _cost_of_steps(core, _LATE - _EARLY - _PERIOD)

    assert core.load().running == 4
    assert late[0] <= early[0], f"{late[0]} calls, not {early[0]}"
    assert late[1] < early[1] + 4 * 256, f"{late[1]} bytes at once, not {early[1]}"
    core.close()


def _cost_of_steps(core: EngineCore, after: int) -> tuple[int, int]:
    """Run `after` steps; return the calls, and the peak memory of a step, of the steps that then fill one block."""
    for _ in range(after):
        core.step()
    calls, peaks = 0, []

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    for _ in range(_PERIOD):
        tracemalloc.start()
        gc.disable()  # a collection calls hypothesis, once another test has used it
        sys.setprofile(count)
        try:
            core.step()
        finally:
            sys.setprofile(None)
            gc.enable()
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    return calls, sorted(peaks)[len(peaks) // 2]
