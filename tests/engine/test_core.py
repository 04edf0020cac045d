"""The engine core on the fake model, whose reference says what every sequence must answer."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest

from engine.core import EngineCore
from engine.fake import Computed, FakeConfig, FakeModel, expected_tokens
from engine.interface import Chunk, Prefilled, StepBatch
from wire.errors import InternalError, InvalidRequest, NeverFits, PromptTooLong
from wire.types import FinishReason, PromptState, SamplingParams, TokenOutput

CONFIG = FakeConfig(salt=1, block_size=4, num_blocks=64, vocab_size=500, max_model_len=100, eos_token_ids=())
MAX_STEPS = 2000


@dataclass
class Answers:
    """What came out of an engine, by (prompt id, sequence)."""

    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    finish: dict[tuple[str, int], FinishReason] = field(default_factory=dict)
    prefilled: list[Prefilled] = field(default_factory=list)
    failed: list[tuple[str, Exception]] = field(default_factory=list)
    first_steps: list[str] = field(default_factory=list)

    def take(self, outputs: Sequence[TokenOutput]) -> None:
        for output in outputs:
            key = output.prompt_id, output.sequence
            assert key not in self.finish, f"{output} after the end"
            if output.token_id is not None:
                assert output.index == len(self.tokens.setdefault(key, [])), f"{output} is out of order"
                self.tokens[key].append(output.token_id)
            if output.finish is not None:
                self.finish[key] = output.finish


@contextmanager
def engine(
    config: FakeConfig = CONFIG, *, seqs: int = 16, tokens: int = 64, chunk: int = 32
) -> Iterator[tuple[EngineCore, FakeModel]]:
    model = FakeModel(config)
    ticks = iter(range(10**9))
    core = EngineCore(
        model, max_num_seqs=seqs, max_num_batched_tokens=tokens, prefill_chunk_size=chunk, clock=lambda: next(ticks)
    )
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


# --- generating ---------------------------------------------------------------------------------------------------


def test_one_prompt_answers_what_the_reference_says() -> None:
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
    """Keeps the batches it is given."""

    batches: list[StepBatch]

    def launch(self, batch: StepBatch, layer_done: Callable[[int], None] | None = None) -> Computed:
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


def test_a_fork_shares_full_blocks_and_copies_the_partial_one_for_all_but_one() -> None:
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
        assert not core.has_work()


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


def test_a_resumed_prompt_goes_on_after_its_outputs() -> None:
    state = prompt("r", 10, max_tokens=12, n=2, temperature=1.0)
    outputs = (tuple(wanted(state, 0)[:5]), tuple(wanted(state, 1)[:1]))
    with engine(chunk=3) as (core, _):
        core.add(replace(state, outputs=outputs))
        answers = Answers(tokens={("r", 0): list(outputs[0]), ("r", 1): list(outputs[1])})

        assert_answers(run(core, answers), [state])


# --- a full pool --------------------------------------------------------------------------------------------------


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
def test_running_prompts_that_outgrow_the_pool_are_recomputed_with_equal_answers(n: int) -> None:
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


def test_an_engine_whose_blocks_others_hold_stalls_without_spinning_and_goes_on() -> None:
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


def test_work_is_left_when_the_only_way_on_is_preemption() -> None:
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


def test_a_preempted_prompt_goes_on_before_those_that_never_ran() -> None:
    config = replace(CONFIG, num_blocks=4)
    with engine(config, seqs=2) as (core, _):
        for name in "abc":
            core.add(prompt(name, 4, max_tokens=9))

        assert [name for name, _ in run(core).finish] == ["a", "b", "c"]
        assert core.load().preemptions >= 1


def test_a_prompt_waits_rather_than_take_the_block_that_a_running_one_needs_next() -> None:
    with engine(replace(CONFIG, num_blocks=4)) as (core, _):
        core.add(prompt("a", 4, max_tokens=9))
        core.step()
        core.add(prompt("b", 12, max_tokens=2))
        core.step()
        assert (core.load().running, core.load().waiting) == (1, 1)

        run(core)
        assert core.load().preemptions == 0


def test_a_prompt_to_be_held_is_not_preempted_while_its_chunks_go_out() -> None:
    with engine(replace(CONFIG, num_blocks=6), chunk=4) as (core, _):
        core.add(prompt("a", 4, max_tokens=9))
        core.step()
        core.add(prompt("h", 16), hold=True)
        starts = list[int]()
        while core.has_work():
            core.step(lambda layer, chunks: starts.extend(chunk.start for chunk in chunks if layer == 0))
        assert (starts, core.load().running, core.load().held_prompts) == ([0, 4, 8, 12], 1, 1)

        core.release("h")
        assert core.has_work()
        core.cancel("a")


def test_a_sequence_that_ends_frees_its_own_blocks_while_the_others_go_on() -> None:
    state = prompt("n", 8, n=2, temperature=1.0)
    stop = wanted(state, 1)[2]
    assert stop not in wanted(state, 0)[:4]
    with engine() as (core, _):
        core.add(replace(state, params=replace(state.params, stop_token_ids=(stop,))))
        core.step()
        core.step()
        assert core.blocks.num_used == 2 + 2
        core.step()

        assert core.blocks.num_used == 2 + 1
        core.cancel("n")


def test_probes_are_counted_apart_while_they_run() -> None:
    with engine() as (core, _):
        core.add(replace(prompt("probe", 9), probe=True))
        core.add(prompt("user", 4))
        core.step()

        assert (core.blocks.num_used, core.blocks.num_probe) == (4, 3)
        core.cancel("probe")
        assert (core.blocks.num_used, core.blocks.num_probe) == (1, 0)


# --- holding and admitting ----------------------------------------------------------------------------------------


def hand_over(
    state: PromptState, source: FakeModel, chunks: Sequence[Chunk], core: EngineCore, to: FakeModel
) -> list[int]:
    """Copy the prompt's KV as a hand-off does: chunk by chunk, token ranges into blocks of the receiver."""
    target = core.blocks.allocate(to.info.layout.num_blocks_for(len(state.token_ids)))
    for chunk in chunks:
        for tensor in range(len(to.info.layout.tensors)):
            data = b"".join(
                bytes(source.memory.buffer[run.offset : run.offset + run.length])
                for run in source.info.layout.runs(tensor, chunk.block_ids, chunk.start, chunk.end)
            )
            for run in to.info.layout.runs(tensor, target, chunk.start, chunk.end):
                to.memory.buffer[run.offset : run.offset + run.length] = data[: run.length]
                data = data[run.length :]
    return list(target)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("block_size", [4, 8])
def test_a_prompt_handed_to_a_second_core_answers_as_the_reference_says(n: int, block_size: int) -> None:
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


def test_layers_are_told_for_held_chunks_only() -> None:
    with engine() as (core, _):
        core.add(prompt("free", 5))
        core.add(prompt("held", 6), hold=True)
        told = list[tuple[int, list[tuple[str, int, int]]]]()
        core.step(lambda layer, chunks: told.append((layer, [(c.prompt_id, c.start, c.end) for c in chunks])))
        core.step(lambda layer, chunks: told.append((layer, [])))

        assert told == [(0, [("held", 0, 6)]), (1, [("held", 0, 6)])]
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


def test_a_held_prompt_that_its_first_tokens_end_holds_nothing() -> None:
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


# --- cancelling ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("hold", [False, True])
def test_cancel_at_every_stage_frees_everything_and_ends_each_sequence_once(steps: int, hold: bool) -> None:
    with engine(chunk=4) as (core, _):
        core.add(prompt("c", 14, max_tokens=4, n=2), hold=hold)
        answers = Answers()
        for _ in range(steps):
            answers.take(core.step().tokens)
        answers.take(core.cancel("c"))
        answers.take(core.cancel("c"))

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


def test_a_sequence_of_a_held_prompt_cancelled_early_is_still_described() -> None:
    with engine() as (core, _):
        core.add(prompt("h", 9, n=2), hold=True)
        core.cancel("h", 1)
        answers = run(core)

        assert [len(tokens) for tokens in answers.prefilled[0].state.outputs] == [1, 1]
        assert set(answers.tokens) == {("h", 0)}
        (ending,) = core.cancel("h")
        assert (ending.sequence, ending.token_id, ending.finish) == (0, None, FinishReason.CANCELLED)
        assert core.blocks.num_used == 0


def test_cancel_of_the_unknown_is_silent() -> None:
    with engine() as (core, _):
        core.add(prompt("c", 3))

        assert core.cancel("other") == core.cancel("c", 7) == core.cancel("c", -1) == ()
        run(core)


# --- refusals and failures ----------------------------------------------------------------------------------------


def test_what_can_never_run_is_refused_with_value_and_limit() -> None:
    with engine(replace(CONFIG, num_blocks=8), seqs=4) as (core, _):
        for state, error, words in [
            (prompt("x", 100), PromptTooLong, "100 tokens .* length is 100"),
            (prompt("x", 20, max_tokens=14), NeverFits, "20 prompt tokens and 1 x 14 output tokens need 9 .* has 8"),
            (prompt("x", 8, max_tokens=14, n=2), NeverFits, "2 x 14 output tokens need 10 .* has 8"),
            (replace(prompt("x", 3), token_ids=(1, 500)), InvalidRequest, r"token id 500 .* \[0, 500\)"),
            (replace(prompt("x", 3), token_ids=(-1, 5)), InvalidRequest, r"token id -1 .* \[0, 500\)"),
            (replace(prompt("x", 3), token_ids=()), InvalidRequest, "empty"),
            (replace(prompt("x", 3), outputs=((500,),)), InvalidRequest, "token id 500"),
            (replace(prompt("x", 3), outputs=((1,), (2,))), InvalidRequest, "outputs of 2 sequences .* n is 1"),
            (replace(prompt("x", 3, max_tokens=1), outputs=((1,),)), InvalidRequest, "nothing is left"),
            (prompt("x", 3, n=5), InvalidRequest, "n is 5: it must be from 1 to 4"),
            (prompt("x", 3, max_tokens=0), InvalidRequest, "max_tokens is 0"),
        ]:
            with pytest.raises(error, match=words):
                core.check(state)
            with pytest.raises(error, match=words):
                core.add(state)
        assert not core.has_work()


def test_what_just_fits_is_taken_and_answered() -> None:
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


def test_a_prompt_that_is_here_already_is_refused() -> None:
    with engine() as (core, _):
        core.add(prompt("x", 3))
        with pytest.raises(InvalidRequest, match="x is here already"):
            core.add(prompt("x", 3))
        assert_answers(run(core), [prompt("x", 3)])


class FailingOnce(FakeModel):
    """Fails in one named call, once."""

    fails_in: str | None = None

    def launch(self, batch: StepBatch, layer_done: Callable[[int], None] | None = None) -> Computed:
        if self._due("launch"):
            raise RuntimeError("device is gone")
        computed = super().launch(batch, layer_done)
        return _Lost(computed.token_ids) if self._due("collect") else computed

    def copy_block(self, source: int, target: int) -> None:
        if self._due("copy_block"):
            raise RuntimeError("no copy")
        super().copy_block(source, target)

    def _due(self, call: str) -> bool:
        due, self.fails_in = self.fails_in == call, None if self.fails_in == call else self.fails_in
        return due


class _Lost(Computed):
    def collect(self) -> list[int]:
        raise RuntimeError("device is gone")


@pytest.mark.parametrize("call", ["launch", "collect"])
def test_a_failed_step_ends_the_prompts_in_it_and_no_others(call: str) -> None:
    model = FailingOnce(CONFIG)
    core = EngineCore(model, max_num_seqs=2, max_num_batched_tokens=64, prefill_chunk_size=64)
    for name in "abc":
        core.add(prompt(name, 9))
    core.step()
    model.fails_in = call
    answers = Answers()
    answers.failed.extend(core.step().failed)
    run(core, answers)
    model.close()

    assert [(name, type(error), str(error)) for name, error in answers.failed] == [
        (name, InternalError, "the step of this prompt failed: RuntimeError: device is gone") for name in "ab"
    ]
    assert answers.tokens == {("c", 0): wanted(prompt("c", 9))}
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


def test_an_error_while_layers_are_told_ends_the_held_prompts_only() -> None:
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


def test_the_load_tells_what_runs_waits_and_is_left() -> None:
    with engine(chunk=4, seqs=1) as (core, _):
        core.add(prompt("a", 10))
        core.add(prompt("b", 5))
        core.step()
        load = core.load()

        assert (load.running, load.waiting, load.uncomputed_tokens, load.held_prompts) == (1, 1, 11, 0)
        core.cancel("a")
        core.cancel("b")
