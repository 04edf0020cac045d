"""The engine core when the pool is full: which prompts wait, are preempted, or keep their blocks."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from engine.core import EngineCore
from engine.prompt import Prompt
from engine.rope_lengths import RopeLengths
from testing.engine.fake_model import FakeConfig
from tests.engine.fake_engines import CONFIG, Answers, assert_answers, engine, prompt, run, wanted
from wire.errors import NeverFits
from wire.types import FinishReason, PromptState

pytestmark = pytest.mark.usefixtures("runs_ahead")


def test_prompts_queue_while_the_pool_is_full() -> None:
    config = replace(CONFIG, num_blocks=6)
    states = [prompt(f"p{i}", 16, max_tokens=4) for i in range(5)]
    with engine(config) as (core, _):
        for state in states:
            core.add(state)
        answers = Answers()
        answers.take(core.step().tokens)
        assert (core.load().running, core.load().waiting) == (1, 4)

        assert_answers(run(core, answers), states, config)
        assert core.load().preemptions == 0


@pytest.mark.parametrize("n", [1, 2])
def test_prompts_outgrowing_the_pool_are_recomputed_equally(n: int) -> None:
    config = replace(CONFIG, num_blocks=18)
    states = [prompt(f"p{i}", 6, max_tokens=24, n=n, temperature=1.0, seed=i) for i in range(6)]
    with engine(config, chunk=7) as (core, _):
        for state in states:
            core.add(state)

        assert_answers(run(core), states, config)
        assert core.load().preemptions > 0
        assert core.blocks.num_used == 0


def test_the_oldest_is_never_preempted() -> None:
    with engine(replace(CONFIG, num_blocks=8)) as (core, _):
        for name in "abc":
            core.add(prompt(name, 4, max_tokens=20))
        answers, gaps = Answers(), 0
        while ("a", 0) not in answers.finish:
            before = len(answers.tokens.get(("a", 0), []))
            answers.take(core.step().tokens)
            gaps += len(answers.tokens.get(("a", 0), [])) == before

        assert gaps == 0
        assert core.load().preemptions > 0


def test_an_engine_without_free_blocks_waits_without_spinning() -> None:
    state = prompt("a", 4, max_tokens=12)
    with engine(replace(CONFIG, num_blocks=8)) as (core, _):
        core.add(state)
        reserved = core.blocks.allocate(6)
        answers = run(core)
        assert not core.has_work()
        assert core.step().tokens == ()
        core.blocks.release(reserved)

        assert core.has_work()
        assert_answers(run(core, answers), [state])
        assert core.load().preemptions == 0


def test_work_is_left_when_only_preemption_could_continue_it() -> None:
    config = replace(CONFIG, num_blocks=4)
    states = [prompt(name, 4, max_tokens=9) for name in "ab"]
    with engine(config) as (core, _):
        for state in states:
            core.add(state)
        answers = Answers()
        for _ in range(5):
            answers.take(core.step().tokens)
        assert (core.blocks.num_free, core.load().preemptions) == (0, 0)
        assert core.has_work()

        assert_answers(run(core, answers), states, config)


def test_a_preempted_prompt_continues_before_those_that_never_ran() -> None:
    config = replace(CONFIG, num_blocks=4)
    with engine(config, seqs=2) as (core, _):
        for name in "abc":
            core.add(prompt(name, 4, max_tokens=9))

        assert [name for name, _ in run(core).finish] == ["a", "b", "c"]
        assert core.load().preemptions >= 1


def test_a_prompt_waits_for_the_next_block_of_a_running_one() -> None:
    with engine(replace(CONFIG, num_blocks=4)) as (core, _):
        core.add(prompt("a", 4, max_tokens=9))
        core.step()
        core.add(prompt("b", 12, max_tokens=2))
        core.step()
        assert (core.load().running, core.load().waiting, core.load().preemptions) == (1, 1, 0)

        core.cancel("a")
        core.step()
        assert (core.load().running, core.load().waiting) == (1, 0)


def test_a_prompt_to_be_held_is_not_preempted_while_its_chunks_go_out() -> None:
    with engine(replace(CONFIG, num_blocks=6), chunk=2) as (core, _):
        core.add(prompt("a", 4, max_tokens=9))
        core.step()
        core.add(prompt("h", 16), hold=True)
        starts = list[int]()
        while core.has_work():
            core.step(lambda layer, chunks: starts.extend(chunk.start for chunk in chunks if layer == 0))
        assert (starts, core.load().running, core.load().held_prompts) == ([0, 2, 4, 6, 8, 10, 12, 14], 1, 1)

        core.release("h")
        assert core.has_work()
        core.cancel("a")


def test_a_finished_sequence_frees_its_own_blocks_at_once(runs_ahead: bool) -> None:
    state = prompt("n", 8, n=2, temperature=1.0)
    stop = wanted(state, 1)[2]
    assert stop not in wanted(state, 0)[:4]
    with engine() as (core, _):
        core.add(replace(state, params=replace(state.params, stop_token_ids=(stop,))))
        used = []
        while core.has_work():
            tokens = core.step().tokens
            used += [core.blocks.num_used] if len(tokens) == 2 else []
            if any(token.finish is not None for token in tokens):
                break
        assert used[-2] == 2 + 2
        if runs_ahead:
            assert core.blocks.num_used == 2 + 2, "a step that writes the ended one's block is launched already"
            core.step()

        assert core.blocks.num_used == 2 + 1
        core.cancel("n")


def test_a_prompt_allocates_only_when_a_chunk_has_room_for_it(runs_ahead: bool) -> None:
    with engine(chunk=4) as (core, _):
        core.add(prompt("a", 10))
        core.add(prompt("b", 10))
        used = list[int]()
        for _ in range(3 - runs_ahead):  # the third step is launched with the second
            core.step()
            used.append(core.blocks.num_used)

        assert used == ([3, 6] if runs_ahead else [3, 3, 6])


def test_no_more_prompts_start_than_max_num_seqs_allows() -> None:
    with engine(seqs=3) as (core, _):
        core.add(prompt("a", 3, n=2))
        core.add(prompt("b", 3, n=2))
        core.step()
        assert (core.load().running, core.load().waiting) == (1, 1)
        core.cancel("a", 0)
        core.step()

        assert (core.load().running, core.load().waiting) == (2, 0)


def test_running_probes_are_counted_separately() -> None:
    with engine() as (core, _):
        core.add(replace(prompt("probe", 9), probe=True))
        core.add(prompt("user", 4))
        core.step()

        assert (core.blocks.num_used, core.blocks.num_probe) == (4, 3)
        core.cancel("probe")
        assert (core.blocks.num_used, core.blocks.num_probe) == (1, 0)


def resumed_before_held(blocks: int) -> tuple[FakeConfig, PromptState, PromptState]:
    """A prompt with 41 outputs so far, whose blocks are not free, and one to be held that has all of its own."""
    config = replace(CONFIG, block_size=16, num_blocks=blocks, max_model_len=96)
    resumed = replace(prompt("resumed", 32, max_tokens=60), outputs=(tuple(range(1, 42)),))
    return config, resumed, prompt("held", 40, max_tokens=3)


def test_a_prompt_waiting_for_blocks_takes_no_chunk() -> None:
    config, resumed, held = resumed_before_held(6)
    with engine(config, tokens=24, chunk=6) as (core, _):
        core.add(resumed)
        core.add(held, hold=True)
        answers = run(core, Answers({("resumed", 0): list(range(1, 42))}))
        assert [one.state.prompt_id for one in answers.prefilled] == ["held"]
        assert not core.has_work()
        core.release("held")

        assert run(core, answers).finish["resumed", 0] is FinishReason.LENGTH
        assert core.load().preemptions == 0


def test_a_step_reported_as_having_work_computes_something() -> None:
    config, resumed, held = resumed_before_held(7)
    for chunk in (1, 6, 50):
        for taken in range(3):
            with engine(config, tokens=24, chunk=chunk, seqs=2) as (core, _):
                core.add(resumed)
                core.add(held, hold=True)
                reserved = core.blocks.allocate(taken)
                _run_without_idle_steps(core)
                core.blocks.release(reserved)
                core.release("held")
                _run_without_idle_steps(core)

                assert core.load().running == core.load().waiting == 0


@contextmanager
def recomputing_past(short_length: int, blocks: int) -> Iterator[EngineCore]:
    """An engine whose model computes a sequence anew as it grows past `short_length` tokens."""
    with engine(replace(CONFIG, num_blocks=blocks)) as (core, model):
        model._info = replace(model._info, rope=RopeLengths("longrope", short_length, recomputes=True))
        yield core


def test_sequences_to_be_recomputed_share_no_prompt_block() -> None:
    state = prompt("n", 14, max_tokens=12, n=3, temperature=1.0)
    with recomputing_past(16, blocks=20) as core:
        with pytest.raises(
            NeverFits, match=r"past 16 tokens, need 21 KV blocks of 4 tokens, but the whole pool has 20"
        ):
            core.add(state)
        core.check(replace(state, params=replace(state.params, n=2)))
        core.check(replace(state, params=replace(state.params, max_tokens=3)))
        core.check(prompt("long", 17, max_tokens=12, n=3))  # always longer than that

    with recomputing_past(16, blocks=21) as core:
        core.add(state)
        assert_answers(run(core), [state])
        assert core.blocks.num_used == 0


def test_a_recomputed_prompt_waits_for_blocks_of_each_sequence() -> None:
    state = prompt("n", 14, max_tokens=12, n=3, temperature=1.0)
    begun = replace(state, outputs=tuple(tuple(wanted(state, i)[:5]) for i in range(3)))
    with recomputing_past(16, blocks=21) as core:
        core.add(begun)
        reserved = core.blocks.allocate(7)
        assert not core.has_work()
        core.step()
        assert (core.load().running, core.load().waiting) == (0, 1)
        core.blocks.release(reserved)

        answers = run(core, Answers({("n", i): list(tokens) for i, tokens in enumerate(begun.outputs)}))
        assert_answers(answers, [state])


def _run_without_idle_steps(core: EngineCore) -> None:
    while core.has_work():
        before = core.load().uncomputed_tokens, [_num_computed(one) for one in core._batch.running.values()]
        result = core.step()
        after = core.load().uncomputed_tokens, [_num_computed(one) for one in core._batch.running.values()]
        assert result.tokens or result.prefilled or before != after


def _num_computed(one: Prompt) -> int:
    return sum(sequence.num_computed for sequence in one.holders)
