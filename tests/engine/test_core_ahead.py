"""The engine core one step ahead of the host: what is launched before its inputs are known, and the results."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest

from engine.core import EngineCore
from engine.interface import Chunk
from engine.step import PendingStep, StepBatch, StepOutput
from testing.engine.fake_model import FakeConfig, FakeModel
from tests.engine.fake_engines import CONFIG, Answers, assert_answers, prompt, run, wanted
from wire.types import FinishReason, PromptState

AHEAD = replace(CONFIG, runs_ahead=True)


class Watched(FakeModel):
    """Records the order of launches and collects; `fails` names those that fail, by call and number."""

    def __init__(self, config: FakeConfig) -> None:
        super().__init__(config)
        self.events: list[tuple[str, int]] = []
        self.batches: list[StepBatch] = []
        self.fails: set[tuple[str, int]] = set()
        self.now = 0.0

    def launch(self, batch: StepBatch, layer_done: Callable[[int], None] | None = None) -> PendingStep:
        number = len(self.batches)
        self.events.append(("launch", number))
        self.batches.append(batch)
        if ("launch", number) in self.fails:
            raise RuntimeError("no launch")
        return _WatchedStep(self, number, super().launch(batch, layer_done))

    @property
    def num_tokens(self) -> int:
        return sum(len(batch.token_ids) for batch in self.batches)


class _WatchedStep:
    def __init__(self, model: Watched, number: int, pending: PendingStep) -> None:
        self.model, self.number, self.pending = model, number, pending

    def collect(self) -> StepOutput:
        self.model.events.append(("collect", self.number))
        self.model.now += 1.0
        output = self.pending.collect()
        if ("collect", self.number) in self.model.fails:
            raise RuntimeError("device is gone")
        return output


@contextmanager
def watched_engine(
    config: FakeConfig = AHEAD, *, seqs: int = 16, chunk: int = 32
) -> Iterator[tuple[EngineCore, Watched]]:
    model = Watched(config)
    core = EngineCore(
        model, max_num_seqs=seqs, max_num_batched_tokens=64, prefill_chunk_size=chunk, clock=lambda: model.now
    )  # fmt: skip
    yield core, model
    core.blocks.check()
    core.close()


def followed(model: Watched) -> list[bool]:
    """Return for each step but the last whether the next was launched before it was collected."""
    at = {event: place for place, event in enumerate(model.events)}
    return [at["launch", i + 1] < at["collect", i] for i in range(len(model.batches) - 1)]


def stopping(name: str, length: int, after: int, **params: object) -> tuple[PromptState, list[int]]:
    """Return a prompt that a stop id ends after this many tokens, and these."""
    state = prompt(name, length)
    reported = wanted(state)[:after]
    assert reported[-1] not in reported[:-1]
    return replace(state, params=replace(state.params, stop_token_ids=(reported[-1],), **params)), reported  # type: ignore[arg-type]


def test_the_next_step_is_launched_before_the_last_one_is_collected() -> None:
    with watched_engine() as (core, model):
        core.add(prompt("a", 9, max_tokens=6))

        assert_answers(run(core), [prompt("a", 9, max_tokens=6)])
        assert followed(model) == [False, True, True, True, True], "the prompt forks first"
        assert [batch.carried for batch in model.batches] == [(), (), *[((0, 0),)] * 4]


def test_a_long_prompt_is_computed_chunk_after_chunk_without_a_wait() -> None:
    with watched_engine(chunk=4) as (core, model):
        core.add(prompt("long", 17, max_tokens=1), hold=True)

        assert len(run(core).prefilled) == 1
        assert followed(model) == [True] * 4


def test_no_token_is_computed_beyond_the_length_limits() -> None:
    states = [prompt("short", 5, max_tokens=3), prompt("model's", 95, max_tokens=50), prompt("n", 7, 4, n=2)]
    with watched_engine() as (core, model):
        for state in states:
            core.add(state)

        assert_answers(run(core), states)
        assert model.num_tokens == (5 + 2) + (95 + 4) + (7 + 2 * 3)


def test_a_stop_id_wastes_one_row_and_frees_its_block_later() -> None:
    state, reported = stopping("a", 6, 3)
    with watched_engine(replace(AHEAD, num_blocks=4)) as (core, model):
        core.add(state)
        answers = Answers()
        while ("a", 0) not in answers.finish:
            answers.take(core.step().tokens)

        assert answers.tokens["a", 0] == reported
        assert core.load().running == 0
        assert (core.blocks.num_used, core.has_work()) == (1, True), "the block of the row that is launched"
        core.blocks.check()
        assert core.step().tokens == ()
        assert (core.blocks.num_used, core.has_work()) == (0, False)
        assert model.num_tokens == 6 + len(reported)


def test_one_sequence_that_stops_leaves_the_others_of_its_prompt() -> None:
    state = prompt("n", 8, n=3, temperature=1.0)
    stop = wanted(state, 1)[2]
    others = {i: wanted(state, i) for i in (0, 2)}
    assert not any(stop in tokens for tokens in others.values())
    with watched_engine() as (core, _):
        core.add(replace(state, params=replace(state.params, stop_token_ids=(stop,))))
        answers = run(core)

        assert answers.tokens["n", 1] == wanted(state, 1)[:3]
        assert {i: answers.tokens["n", i] for i in (0, 2)} == others
        assert core.blocks.num_used == 0


@pytest.mark.parametrize(
    "requested", [{"bad_words": ((3, 4),)}, {"presence_penalty": 0.5}, {"repetition_penalty": 1.2}]
)
def test_no_step_follows_one_whose_tokens_decide_what_may_come_next(requested: dict[str, object]) -> None:
    plain, bound = prompt("plain", 4, max_tokens=9), prompt("bound", 4, max_tokens=4, **requested)
    with watched_engine() as (core, model):
        core.add(plain)
        core.add(bound)

        assert_answers(run(core), [plain, bound])
        assert followed(model) == [False, False, False, False, True, True, True, True]


def test_position_dependent_bans_delay_no_step() -> None:
    state = prompt("a", 6, stop_token_ids=tuple(range(0, 500, 3)), min_tokens=8, logit_bias=((5, 1.0),))
    with watched_engine() as (core, model):
        core.add(state)
        answers = run(core)

        assert answers.tokens["a", 0] == wanted(state)[: len(answers.tokens["a", 0])]
        assert all(token % 3 for token in answers.tokens["a", 0][:7])
        assert len(answers.tokens["a", 0]) >= 8
        assert followed(model)[1:7] == [True] * 6


@pytest.mark.parametrize("steps", range(1, 7))
def test_a_cancel_frees_blocks_not_being_written_at_once(steps: int) -> None:
    with watched_engine() as (core, _):
        core.add(prompt("c", 9, max_tokens=20))
        core.add(prompt("other", 9, max_tokens=20))
        answers = Answers()
        for _ in range(steps):
            answers.take(core.step().tokens)
        used = core.blocks.num_used
        answers.take(core.cancel("c"))

        assert core.blocks.num_used <= used - used // 2 + 1, "one block at most is being written"
        core.blocks.check()
        answers.take(core.step().tokens)
        running = core._batch.running["other"].live[0]
        assert core.blocks.num_used == len(running.block_ids)
        assert run(core, answers).tokens["other", 0] == wanted(prompt("other", 9, max_tokens=20))


def test_a_failed_step_ends_the_next_steps_prompts_once() -> None:
    with watched_engine(seqs=2) as (core, model):
        model.fails = {("collect", 3)}
        for name in "abc":
            core.add(prompt(name, 9))
        answers = run(core)

        assert sorted(name for name, _ in answers.failed) == ["a", "b"]
        assert all("device is gone" in str(error) for _, error in answers.failed)
        assert answers.tokens["c", 0] == wanted(prompt("c", 9))
        assert set(answers.finish) == {("c", 0)}
        assert core.blocks.num_used == 0


def test_a_failed_launch_ends_its_prompts_without_output() -> None:
    with watched_engine() as (core, model):
        model.fails = {("launch", 3)}
        core.add(prompt("a", 9))
        answers, num_after_failure = Answers(), 0
        while core.has_work():
            result = core.step()
            answers.take(result.tokens)
            num_after_failure += len(result.tokens) if answers.failed or result.failed else 0
            answers.failed.extend(result.failed)

        assert [name for name, _ in answers.failed] == ["a"]
        assert num_after_failure == 0
        assert core.blocks.num_used == 0


def test_a_failure_in_a_stopped_sequences_extra_row_is_ignored() -> None:
    state, reported = stopping("a", 6, 3)
    with watched_engine() as (core, model):
        core.add(state)
        model.fails = {("collect", 3)}  # the prompt, two tokens, and the row behind the stop id
        answers = run(core)

        assert (answers.tokens["a", 0], answers.failed) == (reported, [])
        assert answers.finish["a", 0] is FinishReason.STOP


def test_a_held_prompts_chunks_are_reported_at_launch() -> None:
    with watched_engine(chunk=6) as (core, model):
        reported: list[tuple[int, int, int]] = []

        def on_layer(layer: int, chunks: Sequence[Chunk]) -> None:
            reported.extend((len(model.batches), chunk.start, chunk.end) for chunk in chunks if layer == 0)

        core.add(prompt("h", 14), hold=True)
        ends = [len(core.step(on_layer).prefilled) for _ in range(3)]

        assert reported == [(1, 0, 6), (2, 6, 12), (3, 12, 14)]
        assert ends == [0, 0, 1]
        assert model.events.index(("launch", 2)) < model.events.index(("collect", 1))
        core.release("h")


def test_a_prefix_is_found_by_others_only_once_it_is_computed() -> None:
    config = replace(AHEAD, block_size=16, num_blocks=24)
    first = prompt("first", 40, max_tokens=1)
    with watched_engine(config, chunk=40) as (core, model):
        for name in ("first", "second", "third"):
            core.add(replace(first, prompt_id=name))
        answers = run(core)

        assert len({tuple(tokens) for tokens in answers.tokens.values()}) == 1
        assert [len(batch.token_ids) for batch in model.batches] == [40, 40, 8], "the second was launched behind it"


def test_the_seconds_of_steps_never_overlap_and_leave_no_gap() -> None:
    with watched_engine() as (core, model):
        core.add(prompt("a", 9, max_tokens=8))
        seconds = []
        while core.has_work():
            seconds.append(core.step().seconds)
            model.now += 0.25  # what the host does between two steps

        assert seconds[:2] == [1.0, 1.0], "nothing was launched behind the prompt"
        assert seconds[2:] == [1.25] * 6
        assert sum(seconds) == model.now - 0.25 * 2


def test_a_launched_step_is_collected_before_the_pool_is_closed() -> None:
    model = Watched(AHEAD)
    core = EngineCore(model, max_num_seqs=4, max_num_batched_tokens=64, prefill_chunk_size=64)
    core.add(prompt("a", 9))
    for _ in range(3):
        core.step()
    assert followed(model)[-1]
    core.close()

    assert model.events[-1] == ("collect", len(model.batches) - 1)
