"""Requests of every kind to one tiny model, and an engine's outputs for each, to compare devices."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from devices.interface import Device
from engine.core import EngineCore
from engine.interface import Chunk, StepResult
from engine.loader import load_model
from tests.engine.tiny_models import VOCAB_SIZE
from wire.types import BeamSearch, Pooling, PromptState, SamplingParams, TokenLogprobs

MAX_STEPS = 500
PLENTY = 4 << 20


@dataclass
class Outputs:
    """All outputs of an engine, by prompt id, or by (prompt id, sequence)."""

    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    logprobs: dict[tuple[str, int], list[TokenLogprobs]] = field(default_factory=dict)
    prompts: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    vectors: dict[str, tuple[float, ...]] = field(default_factory=dict)
    swapped_out: int = 0

    def take(self, result: StepResult) -> None:
        assert result.failed == ()
        for token in result.tokens:
            key = token.prompt_id, token.sequence
            if token.token_id is not None:
                self.tokens.setdefault(key, []).append(token.token_id)
            if token.logprobs is not None:
                self.logprobs.setdefault(key, []).append(token.logprobs)
        for part in result.prompt_logprobs:
            self.prompts.setdefault(part.prompt_id, []).extend(one for one in part.tokens if one is not None)
        self.swapped_out += sum(as_copies for _, as_copies, _ in result.interrupted)
        self.vectors |= {one.prompt_id: one.values for one in result.pooled}


@contextmanager
def core_on(
    device: Device, path: Path, *, kv_bytes: int = PLENTY, block_size: int = 16, swap_bytes: int = 0, **options: Any
) -> Iterator[EngineCore]:
    """Load the model on the device in float32, and check at the end that all its blocks are free."""
    model = load_model(
        path, dtype="float32", block_size=block_size, kv_cache_memory=kv_bytes, num_threads=1, device=device, **options
    ).model
    core = EngineCore(
        model, max_num_seqs=16, max_num_batched_tokens=64, prefill_chunk_size=24, swap_bytes=swap_bytes
    )  # fmt: skip
    yield core
    core.blocks.check()
    assert core.blocks.num_used == 0
    core.close()


def run(core: EngineCore, on_layer: Callable[[int, Sequence[Chunk]], None] | None = None) -> Outputs:
    """Step until no work is left."""
    outputs = Outputs()
    for _ in range(MAX_STEPS):
        if not core.has_work():
            return outputs
        outputs.take(core.step(on_layer))
        core.blocks.check()
    raise AssertionError(f"work is left after {MAX_STEPS} steps: {core.load()}")


def ids(length: int, seed: int = 0) -> tuple[int, ...]:
    """Return a random prompt."""
    numbers = random.Random(1000 * seed + length)
    return tuple(numbers.randrange(3, VOCAB_SIZE - 20) for _ in range(length))


def plain(name: str, length: int, max_tokens: int = 12, **params: Any) -> PromptState:
    """Return a request, greedy by default."""
    sampling = SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, **params})
    return PromptState(name, f"request-{name}", ids(length), sampling)


def every_sort() -> list[PromptState]:
    """Return requests that use all parameters of sampling, logprobs, vectors and beams."""
    drawn: dict[str, Any] = {"temperature": 0.8, "seed": 7}
    return [
        plain("greedy", 5),
        plain("drawn", 17, **drawn),
        plain("three", 33, **drawn, n=3),
        plain("top_k", 9, **drawn, top_k=5),
        plain("top_p", 8, **drawn, top_p=0.7),
        plain("min_p", 7, **drawn, min_p=0.05),
        plain("all", 12, **drawn, top_k=40, top_p=0.9, min_p=0.01),
        plain("cold", 3, temperature=1e-6, seed=1),
        plain("repeats", 20, repetition_penalty=1.4),
        plain("counts", 21, **drawn, presence_penalty=0.5, frequency_penalty=0.7),
        plain("bias", 6, logit_bias=((9, 3.0), (11, -100.0)), **drawn),
        plain("allowed", 6, allowed_token_ids=tuple(range(30, 90)), **drawn),
        plain("bad", 6, bad_words=((40,), (41, 42)), stop_token_ids=(50, 51), min_tokens=6, **drawn),
        plain("likely", 15, logprobs=4, **drawn),
        plain("scored", 40, logprobs=1, prompt_logprobs=3),
        plain("searched", 11, n=2, best_of=4, beam_search=BeamSearch(), logprobs=2),
        *(
            PromptState(how, f"request-{how}", ids(50, seed), SamplingParams(max_tokens=1), pooling=Pooling(how=how))
            for seed, how in enumerate(("last", "mean", "cls"))
        ),
    ]
