"""The engine core with prompts that are held, admitted and cancelled."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.core import EngineCore
from engine.interface import Chunk
from engine.step import Model
from testing.engine.fake_model import expected_tokens
from tests.engine.fake_engines import CONFIG, Answers, assert_answers, engine, prompt, run, wanted
from wire.errors import InvalidRequest
from wire.types import FinishReason, PromptState

pytestmark = pytest.mark.usefixtures("runs_ahead")


def hand_over(state: PromptState, source: Model, chunks: Sequence[Chunk], core: EngineCore, to: Model) -> list[int]:
    """Copy the prompt's KV as a hand-off does: chunk by chunk, token ranges into blocks of the receiver."""
    target = core.blocks.allocate(to.info.layout.num_blocks_for(len(state.token_ids)))
    for chunk in chunks:
        for tensor in range(len(to.info.layout.tensors)):
            data = b"".join(
                bytes(source.memories[0].buffer[piece.offset : piece.offset + piece.length])
                for piece in source.info.layout.runs(tensor, chunk.block_ids, chunk.start, chunk.end)
            )
            for piece in to.info.layout.runs(tensor, target, chunk.start, chunk.end):
                to.memories[0].buffer[piece.offset : piece.offset + piece.length] = data[: piece.length]
                data = data[piece.length :]
    return list(target)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("block_size", [4, 8])
def test_a_prompt_handed_to_a_second_core_answers_as_the_reference(n: int, block_size: int) -> None:
    state = prompt("x", 21, max_tokens=9, n=n, temperature=1.0, seed=4)
    other = replace(CONFIG, salt=2, block_size=block_size)
    with engine(chunk=6) as (p, p_model), engine(other) as (d, d_model):
        last_layer, answers = list[Chunk](), Answers()
        p.add(state, hold=True)
        while p.has_work():
            result = p.step(lambda layer, chunks: last_layer.extend(chunks) if layer == 1 else None)
            answers.take(result.tokens)
            answers.prefilled.extend(result.prefilled)
        (prefilled,) = answers.prefilled
        d.admit(prefilled.state, hand_over(state, p_model, last_layer, d, d_model))
        p.release("x")
        run(d, answers)

        assert answers.first_steps == ["x"]
        assert [(chunk.start, chunk.end) for chunk in last_layer] == [(0, 6), (6, 12), (12, 18), (18, 21)]
        for i in range(n):
            salts = [1] * 21 + [2]
            expected = expected_tokens(CONFIG, state.token_ids, state.params, count=9, salts=salts, sequence=i)
            assert tuple(answers.tokens["x", i]) == expected
        assert (p.blocks.num_used, d.blocks.num_used) == (0, 0)


@pytest.mark.parametrize("given", [1, 2, 5])
def test_admitted_outputs_beyond_the_prompt_are_computed_again(given: int) -> None:
    state = prompt("x", 10, max_tokens=9)
    with engine() as (core, model):
        core.add(replace(state, prompt_id="source"), hold=True)
        chunks = list[Chunk]()
        core.step(lambda layer, now: chunks.extend(now) if layer == 0 else None)
        outputs = tuple(wanted(state)[:given])
        core.admit(replace(state, outputs=(outputs,)), hand_over(state, model, chunks, core, model))
        core.release("source")

        assert_answers(run(core, Answers(tokens={("x", 0): list(outputs)})), [state])


def test_every_layer_is_reported_for_held_prompts_only(runs_ahead: bool) -> None:
    with engine() as (core, _):
        core.add(prompt("free", 5))
        core.add(prompt("held", 6), hold=True)
        reported = list[tuple[int, list[tuple[str, int, int]]]]()
        for _ in range(2):
            core.step(lambda layer, chunks: reported.append((layer, [(c.prompt_id, c.start, c.end) for c in chunks])))

        first = [(0, [("held", 0, 6)]), (1, [("held", 0, 6)])]
        assert reported[:2] == first
        assert reported[2:] == ([] if runs_ahead else [(0, []), (1, [])]), "a layer is progress, unless only launched"
        core.release("held")
        core.cancel("free")


def test_a_held_prompt_keeps_its_blocks_until_released() -> None:
    with engine() as (core, _):
        core.add(prompt("h", 9), hold=True)
        answers = run(core)

        assert (core.blocks.num_used, core.load().held_prompts) == (3, 1)
        assert answers.prefilled[0].state.outputs == ((wanted(prompt("h", 9))[0],),)
        assert not answers.prefilled[0].finished
        core.release("h")
        core.release("h")
        assert (core.blocks.num_used, core.load().held_prompts) == (0, 0)


def test_a_held_prompt_finished_by_its_first_tokens_holds_nothing() -> None:
    with engine() as (core, _):
        core.add(prompt("h", 9, max_tokens=1, n=2), hold=True)
        answers = run(core)

        assert answers.prefilled[0].finished
        assert answers.finish == {("h", 0): FinishReason.LENGTH, ("h", 1): FinishReason.LENGTH}
        assert core.blocks.num_used == 0


def test_a_held_prompt_with_outputs_is_only_computed() -> None:
    state = prompt("h", 9)
    state = replace(state, outputs=(tuple(wanted(state)[:3]),))
    with engine() as (core, _):
        core.add(state, hold=True)
        answers = run(core)

        assert (answers.tokens, answers.prefilled[0].state) == ({}, state)
        core.release("h")


def test_finished_sequences_are_not_started_by_admit() -> None:
    state = prompt("x", 8, max_tokens=5, n=2, stop_token_ids=(3,))
    with engine() as (core, _):
        core.admit(replace(state, outputs=((3,), (4,))), core.blocks.allocate(2))
        answers = run(core, Answers(tokens={("x", 1): [4]}))

        assert set(answers.tokens) == {("x", 1)} == set(answers.finish)
        core.admit(replace(state, outputs=((3,), (3,))), core.blocks.allocate(2))
        assert (core.has_work(), core.blocks.num_used) == (False, 0)


@pytest.mark.parametrize(
    ("outputs", "num_blocks"), [((), 3), (((),), 3), (((1,), (2,)), 3), (((1,),), 2), (((9999,),), 3)]
)
def test_a_refused_admission_leaves_the_references_to_the_caller(
    outputs: tuple[tuple[int, ...], ...], num_blocks: int
) -> None:
    with engine() as (core, _):
        block_ids = core.blocks.allocate(num_blocks)
        with pytest.raises(InvalidRequest):
            core.admit(replace(prompt("x", 9), outputs=outputs), block_ids)

        assert core.blocks.num_used == num_blocks
        core.blocks.release(block_ids)


def test_blocks_that_an_admitted_prompt_does_not_need_are_freed() -> None:
    with engine() as (core, _):
        core.admit(replace(prompt("x", 4), outputs=((1,),)), core.blocks.allocate(3))

        assert core.blocks.num_used == 1
        core.cancel("x")


@pytest.mark.combinations(2)
@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("hold", [False, True])
def test_a_cancel_at_any_stage_frees_all_and_ends_sequences_once(steps: int, hold: bool) -> None:
    with engine(chunk=4) as (core, _):
        core.add(prompt("c", 14, max_tokens=4, n=2), hold=hold)
        answers = Answers()
        for _ in range(steps):
            answers.take(core.step().tokens)
        answers.take(core.cancel("c"))
        answers.take(core.cancel("c"))
        run(core, answers)  # which collects a step that was launched with it

        assert set(answers.finish) == {("c", 0), ("c", 1)}
        assert (core.blocks.num_used, core.has_work(), core.load().held_prompts) == (0, False, 0)


def test_cancelling_one_sequence_leaves_the_others() -> None:
    state = prompt("c", 9, n=3, temperature=1.0)
    with engine() as (core, _):
        core.add(state)
        answers = Answers()
        answers.take(core.cancel("c", 0))
        answers.take(core.step().tokens)
        answers.take(core.step().tokens)
        answers.take(core.cancel("c", 1))
        run(core, answers)

        assert [answers.finish["c", i] for i in range(3)] == [*[FinishReason.CANCELLED] * 2, FinishReason.LENGTH]
        assert answers.tokens["c", 2] == wanted(state, 2)
        assert (answers.tokens["c", 1], ("c", 0) in answers.tokens) == (wanted(state, 1)[:2], False)
        assert core.blocks.num_used == 0


def test_an_early_cancelled_sequence_is_still_described() -> None:
    with engine() as (core, _):
        core.add(prompt("h", 9, n=2), hold=True)
        core.cancel("h", 1)
        answers = run(core)

        assert [len(tokens) for tokens in answers.prefilled[0].state.outputs] == [1, 1]
        assert set(answers.tokens) == {("h", 0)}
        (ending,) = core.cancel("h")
        assert (ending.sequence, ending.token_id, ending.finish) == (0, None, FinishReason.CANCELLED)
        assert core.blocks.num_used == 0


def test_cancelling_an_unknown_prompt_is_silent() -> None:
    with engine() as (core, _):
        core.add(prompt("c", 3))

        assert core.cancel("other") == core.cancel("c", 7) == core.cancel("c", -1) == ()
        run(core)
