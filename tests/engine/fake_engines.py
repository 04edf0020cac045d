"""Engines on fake models, and what came out of them, for the tests of the core."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from engine.core import EngineCore
from engine.interface import Prefilled
from testing.engine.fake_model import FakeConfig, FakeModel, expected_tokens
from wire.types import FinishReason, PromptState, SamplingParams, TokenLogprobs, TokenOutput

CONFIG = FakeConfig(salt=1, block_size=4, num_blocks=64, vocab_size=500, max_model_len=100, eos_token_ids=())
MAX_STEPS = 2000


@dataclass
class Answers:
    """What came out of an engine, by (prompt id, sequence)."""

    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    logprobs: dict[tuple[str, int], list[TokenLogprobs]] = field(default_factory=dict)
    finish: dict[tuple[str, int], FinishReason] = field(default_factory=dict)
    prefilled: list[Prefilled] = field(default_factory=list)
    failed: list[tuple[str, Exception]] = field(default_factory=list)
    first_steps: list[str] = field(default_factory=list)
    prompt_logprobs: dict[str, list[TokenLogprobs | None]] = field(default_factory=dict)  # by prompt id

    def take(self, outputs: Sequence[TokenOutput]) -> None:
        for output in outputs:
            key = output.prompt_id, output.sequence
            assert key not in self.finish, f"{output} after the end"
            if output.token_id is not None:
                assert output.index == len(self.tokens.setdefault(key, [])), f"{output} is out of order"
                self.tokens[key].append(output.token_id)
            if output.logprobs is not None:
                self.logprobs.setdefault(key, []).append(output.logprobs)
            if output.finish is not None:
                self.finish[key] = output.finish


@contextmanager
def engine(
    config: FakeConfig = CONFIG, *, seqs: int = 16, tokens: int = 64, chunk: int = 32, **options: Any
) -> Iterator[tuple[EngineCore, FakeModel]]:
    """Make an engine on a fake model; `options` are more of EngineCore's."""
    model = FakeModel(config)
    ticks = iter(range(10**9))
    core = EngineCore(
        model, max_num_seqs=seqs, max_num_batched_tokens=tokens, prefill_chunk_size=chunk, clock=lambda: next(ticks),
        **options,
    )  # fmt: skip
    try:
        yield core, model
        core.blocks.check()
    finally:
        model.close()


def run(core: EngineCore, answers: Answers | None = None, *, until_held: int = 0) -> Answers:
    """Step until no work is left, or `until_held` prompts are held."""
    answers = answers or Answers()
    for _ in range(MAX_STEPS):
        if not core.has_work() or (until_held and core.load().held_prompts == until_held):
            return answers
        result = core.step()
        answers.take(result.tokens)
        answers.prefilled.extend(result.prefilled)
        answers.failed.extend(result.failed)
        answers.first_steps.extend(prompt_id for prompt_id, _ in result.first_steps)
        for part in result.prompt_logprobs:
            answers.prompt_logprobs.setdefault(part.prompt_id, []).extend(part.tokens)
        core.blocks.check()
    raise AssertionError(f"work is left after {MAX_STEPS} steps: {core.load()}")


def prompt(name: str, length: int, max_tokens: int = 10, **params: object) -> PromptState:
    token_ids = tuple((hash_of(name) + 7 * i) % CONFIG.vocab_size for i in range(length))
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0)
    return PromptState(name, f"request-{name}", token_ids, replace(sampling, **params))  # type: ignore[arg-type]


def hash_of(name: str) -> int:
    return sum(ord(letter) * 31**i for i, letter in enumerate(name))


def wanted(state: PromptState, sequence: int = 0, config: FakeConfig = CONFIG) -> list[int]:
    count = min(state.params.max_tokens, config.max_model_len - len(state.token_ids))
    salts = [config.salt]
    return list(expected_tokens(config, state.token_ids, state.params, count=count, salts=salts, sequence=sequence))


def assert_answers(answers: Answers, states: Sequence[PromptState], config: FakeConfig = CONFIG) -> None:
    for state in states:
        for sequence in range(state.params.n):
            key = state.prompt_id, sequence
            assert answers.tokens[key] == wanted(state, sequence, config), key
            assert answers.finish[key] is FinishReason.LENGTH
