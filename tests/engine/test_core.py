"""The engine core on the fake model: generating, refusing and failing."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from engine.core import EngineCore
from engine.interface import Chunk
from engine.step import PendingStep, StepBatch, StepOutput
from testing.engine.fake_model import FakeModel
from tests.engine.fake_engines import CONFIG, Answers, assert_answers, engine, prompt, run, wanted
from wire.errors import InternalError, InvalidRequest, NeverFits, PromptTooLong
from wire.types import FinishReason, PromptImage

pytestmark = pytest.mark.usefixtures("runs_ahead")


IMAGE = PromptImage(0, 1, b"a" * 32, (1, 1, 1))


def test_one_prompt_answers_as_the_reference() -> None:
    with engine() as (core, _):
        core.add(prompt("a", 9))

        assert_answers(run(core), [prompt("a", 9)])
        assert core.blocks.num_used == 0


@pytest.mark.parametrize(("seqs", "tokens", "chunk"), [(16, 64, 32), (16, 7, 3), (3, 64, 1), (1, 1, 1), (4, 5, 64)])
def test_a_continuous_batch_of_any_limits_equals_one_at_a_time(seqs: int, tokens: int, chunk: int) -> None:
    states = [prompt(f"p{i}", 1 + 5 * i, max_tokens=1 + 3 * (i % 4)) for i in range(9)]
    with engine(seqs=seqs, tokens=tokens, chunk=chunk) as (core, _):
        answers = Answers()
        for state in states:
            core.add(state)
            answers.take(core.step().tokens)

        assert_answers(run(core, answers), states)
        assert core.blocks.num_used == 0


class Recording(FakeModel):
    """Records the batches it is given."""

    batches: list[StepBatch]

    def launch(self, batch: StepBatch, layer_done: Callable[[int], None] | None = None) -> PendingStep:
        self.batches.append(batch)
        return super().launch(batch, layer_done)


def test_no_step_exceeds_its_limits() -> None:
    model = Recording(CONFIG)
    model.batches = []
    core = EngineCore(model, max_num_seqs=4, max_num_batched_tokens=10, prefill_chunk_size=6)
    for i in range(6):
        core.add(prompt(f"p{i}", 11))
    run(core)
    model.close()

    assert max(len(batch.sequences) for batch in model.batches) == 4
    assert max(len(batch.token_ids) for batch in model.batches) <= 10
    assert max(sum(part.count for part in batch.sequences if part.count > 1) for batch in model.batches) == 6


@pytest.mark.parametrize("length", [8, 9, 3])
def test_sequences_of_one_prompt_share_its_blocks_and_differ(length: int) -> None:
    state = prompt("n", length, n=3, temperature=1.0, seed=77)
    with engine() as (core, _):
        core.add(state)
        answers = run(core)

        assert_answers(answers, [state])
        assert len({tuple(tokens) for tokens in answers.tokens.values()}) == 3
        assert core.blocks.num_used == 0


def test_a_fork_shares_full_blocks_and_copies_the_partial_one() -> None:
    with engine() as (core, _):
        core.add(prompt("n", 10, n=3))
        core.step()
        assert core.blocks.num_used == 3
        core.step()

        assert core.blocks.num_used == 2 + 3
        core.cancel("n")


def test_a_stop_token_ends_a_sequence_and_is_named() -> None:
    state = prompt("a", 6)
    stop = wanted(state)[4]
    state = replace(state, params=replace(state.params, stop_token_ids=(stop,)))
    with engine() as (core, _):
        core.add(state)
        outputs = [output for _ in range(5) for output in core.step().tokens]

        assert [output.token_id for output in outputs] == wanted(state)[:5]
        assert (outputs[-1].finish, outputs[-1].stop_token_id) == (FinishReason.STOP, stop)
        assert run(core).tokens == {}
        assert core.blocks.num_used == 0


def test_min_tokens_ban_the_stop_token_until_reached() -> None:
    free = prompt("a", 6)
    stop = wanted(free)[0]
    state = replace(free, params=replace(free.params, stop_token_ids=(stop,), min_tokens=3))
    with engine() as (core, _):
        core.add(state)
        answers = run(core)

        assert answers.tokens["a", 0][:3] == wanted(state)[:3]
        assert stop not in answers.tokens["a", 0][:3]


def test_a_sequence_ends_at_the_models_length() -> None:
    state = prompt("long", 95, max_tokens=50)
    with engine() as (core, _):
        core.add(state)

        assert_answers(run(core), [state])
        assert len(wanted(state)) == 5


def test_a_resumed_prompt_continues_after_its_outputs() -> None:
    state = prompt("r", 10, max_tokens=12, n=2, temperature=1.0)
    outputs = (tuple(wanted(state, 0)[:5]), tuple(wanted(state, 1)[:1]))
    with engine(chunk=3) as (core, _):
        core.add(replace(state, outputs=outputs))
        answers = Answers(tokens={("r", 0): list(outputs[0]), ("r", 1): list(outputs[1])})

        assert_answers(run(core, answers), [state])


@pytest.mark.parametrize(
    ("limits", "arriving", "shortest_s"),
    [((), (), 0.1), ((0.0, 0.5), (), 0.1), ((0.5,), (), 0.5), ((0.5, 0.05), (), 0.05), ((0.5,), (0.05,), 0.05)],
)
def test_the_shortest_limit_of_gaps_among_streams_counts(
    limits: Sequence[float], arriving: Sequence[float], shortest_s: float
) -> None:
    core = EngineCore(
        FakeModel(CONFIG), max_num_seqs=4, max_num_batched_tokens=64, prefill_chunk_size=64, gap_limit_s=0.1
    )
    core.arriving = lambda: arriving
    for number, limit_s in enumerate(limits):
        core.add(replace(prompt(str(number), 5), gap_limit_s=limit_s))
    before_s = core.load().gap_limit_s
    core.step()  # computes the prompts: now they are streams

    assert before_s == min(arriving, default=0.1)
    assert (core.load().gap_limit_s, core.load().decoding) == (shortest_s, len(limits))


def test_impossible_prompts_are_refused_with_value_and_limit() -> None:
    with engine(replace(CONFIG, num_blocks=8), seqs=4) as (core, _):
        for state, error, words in [
            (prompt("x", 100), PromptTooLong, "100 tokens, .* length is 100"),
            (prompt("x", 20, max_tokens=14), NeverFits, "20 prompt tokens and 1 x 14 output tokens need 9 .* has 8"),
            (prompt("x", 8, max_tokens=14, n=2), NeverFits, "2 x 14 output tokens need 10 .* has 8"),
            (replace(prompt("x", 3), token_ids=(1, 500)), InvalidRequest, r"token id 500 .* \[0, 500\)"),
            (replace(prompt("x", 3), token_ids=(-1, 5)), InvalidRequest, r"token id -1 .* \[0, 500\)"),
            (replace(prompt("x", 3), token_ids=()), InvalidRequest, "empty"),
            (replace(prompt("x", 3), outputs=((500,),)), InvalidRequest, "token id 500"),
            (replace(prompt("x", 3), outputs=((1,), (2,))), InvalidRequest, "given outputs is 2, but n is 1"),
            (replace(prompt("x", 3, max_tokens=1), outputs=((1,),)), InvalidRequest, "nothing to generate"),
            (prompt("x", 3, n=5), InvalidRequest, "n is 5: it must be from 1 to 4"),
            (prompt("x", 3, max_tokens=0), InvalidRequest, "max_tokens is 0"),
            (replace(prompt("x", 3), images=(IMAGE,)), InvalidRequest, "fake is a text model: it takes no images"),
        ]:
            with pytest.raises(error, match=words):
                core.check(state)
            with pytest.raises(error, match=words):
                core.add(state)
        assert not core.has_work()


def test_prompts_that_just_fit_are_answered() -> None:
    config = replace(CONFIG, num_blocks=8)
    states = [prompt("x", 20, max_tokens=13), prompt("y", 8, max_tokens=13, n=2), prompt("z", 31, max_tokens=1, n=4)]
    with engine(config) as (core, _):
        for state in states:
            core.add(state)

        assert_answers(run(core), states, config)


def test_a_held_prompt_needs_room_for_its_prompt_only() -> None:
    with engine(replace(CONFIG, num_blocks=3)) as (core, _):
        core.add(prompt("h", 12, max_tokens=50), hold=True)

        assert len(run(core).prefilled) == 1
        core.release("h")


def test_a_prompt_with_a_known_id_is_refused() -> None:
    with engine() as (core, _):
        core.add(prompt("x", 3))
        with pytest.raises(InvalidRequest, match="x is already in this engine"):
            core.add(prompt("x", 3))
        assert_answers(run(core), [prompt("x", 3)])


class FailingOnce(FakeModel):
    """Fails in one named call, once."""

    fails_in: str | None = None

    def launch(self, batch: StepBatch, layer_done: Callable[[int], None] | None = None) -> PendingStep:
        if self._fails_now("launch"):
            raise RuntimeError("device is gone")
        computed = super().launch(batch, layer_done)
        return _Lost() if self._fails_now("collect") else computed

    def copy_block(self, source: int, target: int) -> None:
        if self._fails_now("copy_block"):
            raise RuntimeError("no copy")
        super().copy_block(source, target)

    def _fails_now(self, call: str) -> bool:
        due, self.fails_in = self.fails_in == call, None if self.fails_in == call else self.fails_in
        return due


class _Lost:
    def collect(self) -> StepOutput:
        raise RuntimeError("device is gone")


@pytest.mark.parametrize("call", ["launch", "collect"])
def test_a_failed_step_ends_the_prompts_in_it_and_no_others(call: str) -> None:
    model = FailingOnce(CONFIG)
    core = EngineCore(model, max_num_seqs=2, max_num_batched_tokens=64, prefill_chunk_size=64)
    for name in "abc":
        core.add(prompt(name, 9))
    answers = Answers()
    answers.take(core.step().tokens)
    model.fails_in = call
    run(core, answers)
    model.close()

    assert [(name, type(error), str(error)) for name, error in answers.failed] == [
        (name, InternalError, "the step of this prompt failed: RuntimeError: device is gone") for name in "ab"
    ]
    assert answers.tokens["c", 0] == wanted(prompt("c", 9))
    assert set(answers.finish) == {("c", 0)}
    assert core.blocks.num_used == 0
    core.blocks.check()


def test_a_failed_copy_ends_its_prompt_only() -> None:
    model = FailingOnce(CONFIG)
    core = EngineCore(model, max_num_seqs=8, max_num_batched_tokens=64, prefill_chunk_size=64)
    model.fails_in = "copy_block"
    core.add(prompt("forked", 9, n=2))
    core.add(prompt("other", 9))
    answers = run(core)
    model.close()

    assert [name for name, _ in answers.failed] == ["forked"]
    assert answers.tokens["other", 0] == wanted(prompt("other", 9))
    assert core.blocks.num_used == 0


def test_an_error_in_layer_done_ends_only_held_prompts() -> None:
    def refuse(layer: int, chunks: Sequence[Chunk]) -> None:
        raise ValueError("no link")

    with engine() as (core, _):
        core.add(prompt("held", 9), hold=True)
        core.add(prompt("free", 9))
        result = core.step(refuse)
        answers = Answers()
        answers.take(result.tokens)

        assert [(name, str(error)) for name, error in result.failed] == [
            ("held", "the step of this prompt failed: ValueError: no link")
        ]
        assert_answers(run(core, answers), [prompt("free", 9)])
        assert core.blocks.num_used == 0


def test_the_load_reports_running_waiting_and_free() -> None:
    with engine(chunk=4, seqs=1) as (core, _):
        core.add(prompt("a", 10))
        core.add(prompt("b", 5))
        core.step()
        load = core.load()

        assert (load.running, load.waiting, load.uncomputed_tokens, load.held_prompts) == (1, 1, 11, 0)
        core.cancel("a")
        core.cancel("b")


def test_a_probe_is_answered_while_a_long_prompt_is_computed(runs_ahead: bool) -> None:
    with engine(tokens=8, chunk=8) as (core, _):
        core.add(prompt("long", 80, max_tokens=1))
        core.step()
        core.add(replace(prompt("probe", 3, max_tokens=1), probe=True))

        answered = [token.prompt_id for _ in range(1 + runs_ahead) for token in core.step().tokens]

        assert answered == ["probe"], "in the next step that is launched"
        run(core)
