"""A pool of a tenth of the needed size, random work: every answer equals the unbounded pool's, and none starves."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core import EngineCore
from engine.prompt import Prompt
from testing.engine.fake_model import FakeConfig, FakeModel, expected_tokens
from tests.engine.fake_engines import Answers
from tests.examples import examples
from wire.types import FinishReason, PromptState, SamplingParams

pytestmark = pytest.mark.usefixtures("runs_ahead")

CONFIG = FakeConfig(salt=5, num_layers=1, heads=1, head_dim=2, block_size=16, vocab_size=90, max_model_len=400)
BLOCK_BYTES = 16 * 2 * 2 * 4
STARTS = (tuple(range(50)), tuple(range(40, 90)), tuple(range(16)))

prompts = st.builds(
    lambda start, own, tokens, n, tenant: (start, own, SamplingParams(tokens, seed=own, n=n), tenant),
    st.sampled_from(STARTS), st.integers(1, 40), st.integers(1, 60), st.integers(1, 3), st.sampled_from(("", "t")),
)  # fmt: skip


def states_of(drawn: list[tuple[tuple[int, ...], int, SamplingParams, str]]) -> list[PromptState]:
    return [
        PromptState(f"p{i}", "r", (*start, *((own * 7 + j * 3) % 90 for j in range(own))), params, cache_salt=tenant)
        for i, (start, own, params, tenant) in enumerate(drawn)
    ]


def blocks_asked(state: PromptState) -> int:
    """Blocks of the prompt and all its outputs, nothing shared but the prompt's."""
    length, params = len(state.token_ids), state.params
    return length // 16 + params.n * (-(-(length + params.max_tokens - 1) // 16) - length // 16)


def run_to_the_end(core: EngineCore, states: list[PromptState], added_each_step: int) -> tuple[Answers, int]:
    """Step until all have ended; in each step the oldest that has begun must progress.

    One step ahead it skips a step when its prompt has been computed.
    """
    answers, left, steps, still = Answers(), list(states), 0, 0
    work = sum(len(state.token_ids) + state.params.n * state.params.max_tokens for state in states)
    while left or core.has_work():
        for state in left[:added_each_step]:
            core.add(state)
        left = left[added_each_step:]
        oldest = min(core._batch.running.values(), key=lambda prompt: prompt.age, default=None)
        before = progress(oldest)
        result = core.step()
        assert result.failed == ()
        still = 0 if oldest is None or oldest.ended or progress(oldest) > before else still + 1
        assert still <= core.runs_ahead, "the oldest stood still"
        answers.take(result.tokens)
        core.blocks.check()
        core._batch.swap.check()
        steps += 1
        assert steps <= work * (1 + core.runs_ahead), "more steps than tokens: somebody is computed again and again"
    return answers, steps


def progress(prompt: Prompt | None) -> tuple[int, bool, int]:
    """Return how far a prompt is: its output tokens, whether its prompt is done, what is computed of the rest."""
    if prompt is None:
        return 0, False, 0
    outputs = sum(sequence.num_outputs for sequence in prompt.sequences)
    return outputs, prompt.stem is None, sum(sequence.num_computed for sequence in prompt.holders)


@examples(25)
@given(
    st.lists(prompts, min_size=2, max_size=9), st.integers(0, 40), st.booleans(), st.integers(3, 40),
    st.integers(1, 3),
)  # fmt: skip
def test_answers_under_pressure_equal_those_of_an_unbounded_pool(
    drawn: list[tuple[tuple[int, ...], int, SamplingParams, str]],
    swap_blocks: int,
    caches: bool,
    chunk: int,
    added_each_step: int,
) -> None:
    states = states_of(drawn)
    needed = sum(map(blocks_asked, states))
    num_blocks = max(-(-needed // 10), *map(blocks_asked, states))
    model = FakeModel(replace(CONFIG, num_blocks=num_blocks))
    core = EngineCore(
        model, max_num_seqs=12, max_num_batched_tokens=max(chunk, 12) + 12, prefill_chunk_size=chunk,
        prefix_caching=caches, swap_bytes=swap_blocks * BLOCK_BYTES,
    )  # fmt: skip
    answers, _ = run_to_the_end(core, states, added_each_step)
    used, aside = core.blocks.num_used, core._batch.swap.num_used
    model.close()

    assert (used, aside) == (0, 0)
    for state in states:
        for i in range(state.params.n):
            wanted = expected_tokens(
                CONFIG, state.token_ids, state.params, count=state.params.max_tokens, salts=[5], sequence=i
            )
            assert tuple(answers.tokens[state.prompt_id, i]) == wanted
            assert answers.finish[state.prompt_id, i] is FinishReason.LENGTH


def test_a_pool_of_a_tenth_preempts_and_answers_the_same() -> None:
    states = states_of([(STARTS[i % 3], 5 + i, SamplingParams(60, seed=i, n=1 + i % 2), "") for i in range(24)])
    needed = sum(map(blocks_asked, states))
    reported: list[dict[tuple[str, int], list[int]]] = []
    for num_blocks, swap_bytes in ((needed, 0), (-(-needed // 10), 0), (-(-needed // 10), 1 << 20)):
        model = FakeModel(replace(CONFIG, num_blocks=num_blocks))
        core = EngineCore(
            model, max_num_seqs=64, max_num_batched_tokens=512, prefill_chunk_size=64, swap_bytes=swap_bytes
        )
        answers, _ = run_to_the_end(core, states, 24)
        assert (core.load().preemptions > 0) == (num_blocks < needed)
        reported.append(answers.tokens)
        model.close()

    assert reported[0] == reported[1] == reported[2]
