"""Preemption by copies: blocks come back unchanged, shared ones once, and token ids are used where there is no room."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from engine.core import EngineCore
from engine.step import StepBatch
from testing.engine.fake_model import FakeModel
from tests.engine.fake_engines import CONFIG, Answers, assert_answers, engine, prompt, run, wanted
from wire.types import PromptState

pytestmark = pytest.mark.usefixtures("runs_ahead")

SMALL = replace(CONFIG, num_blocks=18)
CACHED = replace(CONFIG, block_size=16, num_blocks=7, max_model_len=200)
PLENTY = 1 << 20


class Watched:
    """What a model computed, and what went out to the swap area and came back, in blocks."""

    def __init__(self, model: FakeModel) -> None:
        self.tokens = self.saved = self.loaded = 0
        launch, save, load = model.launch, model.save_blocks, model.load_blocks

        def launch_counted(batch: StepBatch, layer_done: Callable[[int], None] | None = None) -> Any:
            self.tokens += len(batch.token_ids)
            return launch(batch, layer_done)

        def save_counted(block_ids: Sequence[int], slots: Sequence[int]) -> None:
            self.saved += len(block_ids)
            save(block_ids, slots)

        def load_counted(slots: Sequence[int], block_ids: Sequence[int]) -> None:
            self.loaded += len(slots)
            load(slots, block_ids)

        model.launch, model.save_blocks = launch_counted, save_counted  # type: ignore[method-assign]
        model.load_blocks = load_counted  # type: ignore[method-assign]


@contextmanager
def watched_engine(
    config: Any = SMALL, *, swap_bytes: int = PLENTY, **options: Any
) -> Iterator[tuple[EngineCore, Watched]]:
    with engine(config, swap_bytes=swap_bytes, **options) as (core, model):
        yield core, Watched(model)
        core._batch.swap.check()
        assert core._batch.swap.num_used == 0


def block_bytes(config: Any) -> int:
    layout_bytes: int = config.block_size * config.num_layers * 2 * config.heads * config.head_dim * 4
    return layout_bytes


def step_until_preempted(core: EngineCore, answers: Answers) -> None:
    for _ in range(200):
        if core.load().preemptions:
            return
        answers.take(core.step().tokens)
    raise AssertionError(f"nobody was preempted: {core.load()}")


@pytest.mark.combinations(1)
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("chunk", [7, 32])
def test_swapped_out_prompts_return_with_equal_answers(n: int, chunk: int) -> None:
    config = replace(CONFIG, num_blocks=8 + 6 * n)
    states = [prompt(f"p{i}", 6, max_tokens=24, n=n, temperature=1.0, seed=i) for i in range(6)]
    with watched_engine(config, chunk=chunk) as (core, seen):
        for state in states:
            core.add(state)

        assert_answers(run(core), states, config)
        assert core.load().preemptions > 0
        assert seen.saved == seen.loaded > 0
        assert seen.tokens == 6 * (6 + n * 23)  # nothing was computed twice
        assert core.blocks.num_used == 0


def test_without_a_swap_area_they_are_rebuilt() -> None:
    states = [prompt(f"p{i}", 6, max_tokens=24) for i in range(6)]
    with watched_engine(swap_bytes=0) as (core, seen):
        for state in states:
            core.add(state)

        assert_answers(run(core), states, SMALL)
        assert (seen.saved, seen.loaded) == (0, 0)
        assert seen.tokens > 6 * (6 + 23)


def test_only_sequences_too_large_for_swap_are_recomputed() -> None:
    states = [prompt(f"p{i}", 6, max_tokens=24) for i in range(6)]
    with watched_engine(swap_bytes=6 * block_bytes(SMALL)) as (core, seen):
        for state in states:
            core.add(state)
        answers, peak = Answers(), 0
        for _ in range(40):
            answers.take(core.step().tokens)
            peak = max(peak, core.load().blocks_swapped)

        assert 0 < peak <= 6
        assert_answers(run(core, answers), states, SMALL)
        assert seen.saved > 0
        assert seen.tokens > 6 * (6 + 23)


def test_blocks_that_sequences_share_are_copied_once() -> None:
    config = replace(CONFIG, num_blocks=14)
    old, young = prompt("old", 4, max_tokens=30), prompt("young", 17, max_tokens=9, n=3, temperature=1.0, seed=5)
    with watched_engine(config) as (core, seen):
        core.add(old)
        core.add(young)
        answers = Answers()
        step_until_preempted(core, answers)
        computed = max(len(answers.tokens["young", i]) for i in range(3)) + 17 - 1

        assert seen.saved == 4 + 3 * (-(-computed // 4) - 4)
        assert_answers(run(core, answers), [old, young], config)


def test_a_prompt_preempted_half_computed_resumes_there() -> None:
    config = replace(CONFIG, num_blocks=11)
    old, young = prompt("old", 4, max_tokens=24), prompt("young", 30, max_tokens=3)
    with watched_engine(config, chunk=1, tokens=8) as (core, seen):
        core.add(old)
        answers = Answers()
        for _ in range(5):
            answers.take(core.step().tokens)
        core.add(young)
        step_until_preempted(core, answers)
        assert ("young", 0) not in answers.tokens

        assert_answers(run(core, answers), [old, young], config)
        assert seen.saved > 0
        assert seen.tokens == 4 + 23 + 30 + 2


@pytest.mark.parametrize("sequence", [None, 0])
def test_cancelling_a_swapped_out_prompt_frees_its_copies(sequence: int | None) -> None:
    states = [prompt(name, 6, max_tokens=30, n=2, temperature=1.0, seed=1) for name in "ab"]
    with watched_engine(replace(CONFIG, num_blocks=20)) as (core, _):
        for state in states:
            core.add(state)
        answers = Answers()
        step_until_preempted(core, answers)
        before = core._batch.swap.num_used
        answers.take(core.cancel("b", sequence))

        assert core._batch.swap.num_used < before
        run(core, answers)
        for name, i in (("a", 0), ("a", 1), *([("b", 1)] if sequence == 0 else [])):
            assert answers.tokens[name, i] == wanted(prompt(name, 6, max_tokens=30, n=2, temperature=1.0, seed=1), i)


@pytest.mark.parametrize("broken", ["save_blocks", "load_blocks"])
def test_a_failed_copy_costs_only_a_recomputation(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no room for a copy")

    states = [prompt(f"p{i}", 6, max_tokens=24) for i in range(6)]
    with watched_engine() as (core, seen):
        monkeypatch.setattr(core._model, broken, fail)
        for state in states:
            core.add(state)

        assert_answers(run(core), states, SMALL)
        assert seen.tokens > 6 * (6 + 23)


def test_a_probe_is_never_copied() -> None:
    with watched_engine(replace(CONFIG, num_blocks=8)) as (core, seen):
        core.add(prompt("a", 4, max_tokens=24))
        core.add(replace(prompt("probe", 4, max_tokens=24), probe=True))
        answers = run(core)

        assert core.load().preemptions > 0
        assert seen.saved == 0
        assert answers.tokens["probe", 0] == wanted(prompt("probe", 4, max_tokens=24))


def cached_prompt(name: str, start: tuple[int, ...], length: int, **params: Any) -> PromptState:
    state = prompt(name, length, **params)
    return replace(state, token_ids=(*start, *state.token_ids))


def test_cached_blocks_are_not_copied_back() -> None:
    shared = tuple(range(32))
    states = [cached_prompt(f"p{i}", shared, 4, max_tokens=40) for i in range(3)]
    with watched_engine(CACHED) as (core, seen):
        core.add(states[0])
        answers = Answers()
        answers.take(core.step().tokens)
        answers.take(core.step().tokens)
        for state in states[1:]:
            core.add(state)
        run(core, answers)

        assert core.load().preemptions > 0
        assert 0 < seen.loaded < seen.saved
        assert_answers(answers, states, CACHED)


def test_recomputation_uses_cached_blocks() -> None:
    states = [prompt(f"p{i}", 40, max_tokens=40) for i in range(2)]
    with watched_engine(CACHED, swap_bytes=0) as (core, seen):
        for state in states:
            core.add(state)
        answers = run(core)

        assert core.load().preemptions == 1
        assert seen.tokens < 2 * (40 + 39) + 40
        assert_answers(answers, states, CACHED)


def test_two_equal_sequences_are_swapped_out_and_back() -> None:
    config = replace(CACHED, num_blocks=9)
    old, twins = prompt("old", 20, max_tokens=90), prompt("twins", 20, max_tokens=60, n=2)
    with watched_engine(config) as (core, seen):
        core.add(old)
        answers = Answers()
        answers.take(core.step().tokens)
        core.add(twins)
        run(core, answers)

        assert core.load().preemptions > 0
        assert seen.saved > 0
        assert_answers(answers, [old, twins], config)
        assert core.blocks.num_used == 0


def test_a_start_that_raises_ends_only_that_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [prompt(name, 6, max_tokens=5) for name in ("bad", "good")]
    with watched_engine() as (core, _):
        take = core.blocks.take

        def fail_once(*args: Any, **options: Any) -> Any:
            monkeypatch.setattr(core.blocks, "take", take)
            raise RuntimeError("no such block")

        monkeypatch.setattr(core.blocks, "take", fail_once)
        for state in states:
            core.add(state)
        answers = run(core)

        assert [prompt_id for prompt_id, _ in answers.failed] == ["bad"]
        assert "no such block" in str(answers.failed[0][1])
        assert_answers(answers, states[1:])
        assert core.blocks.num_used == 0
