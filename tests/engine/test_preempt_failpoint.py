"""The failpoint engine.preempt stops each prompt once in the middle of its output, as a full pool does. No model."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from engine.core import EngineCore
from processes.failpoints import VARIABLE, process_failpoints
from tests.engine.fake_engines import CONFIG, Answers, assert_answers, engine, prompt, wanted
from wire.types import PromptState

pytestmark = pytest.mark.usefixtures("runs_ahead")

PLENTY = 1 << 20
Interrupted = list[tuple[str, int, int, int]]
"""The preemptions: prompt id, by copies or by token ids, and how many tokens were out then."""


@contextmanager
def preempting(monkeypatch: pytest.MonkeyPatch, setting: str, swap_bytes: int) -> Iterator[EngineCore]:
    monkeypatch.setenv(VARIABLE, setting)
    process_failpoints.cache_clear()
    try:
        with engine(swap_bytes=swap_bytes) as (core, _):
            yield core
            assert core.blocks.num_used == core.load().blocks_swapped == 0
    finally:
        process_failpoints.cache_clear()


def served(core: EngineCore, states: list[PromptState]) -> tuple[Answers, Interrupted]:
    answers, interrupted = Answers(), []
    for state in states:
        core.add(state)
    while core.has_work():
        result = core.step()
        for prompt_id, swaps, rebuilds in result.interrupted:
            interrupted.append((prompt_id, swaps, rebuilds, len(answers.tokens[prompt_id, 0])))
        answers.take(result.tokens)
        core.blocks.check()
    return answers, interrupted


@pytest.mark.parametrize(("swap_bytes", "ways"), [(PLENTY, (1, 0)), (0, (0, 1))])
@pytest.mark.parametrize("n", [1, 3])
def test_each_prompt_is_preempted_once_and_answers_the_same(
    swap_bytes: int, ways: tuple[int, int], n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [prompt(f"p{i}", 5 + 9 * i, max_tokens=8, n=n, temperature=1.0, seed=i) for i in range(4)]
    with preempting(monkeypatch, "engine.preempt=after:2", swap_bytes) as core:
        answers, interrupted = served(core, states)

        assert_answers(answers, states)
        assert sorted(interrupted) == [(state.prompt_id, *ways, 2) for state in states]
        assert core.load().preemptions == len(states)


def test_without_the_failpoint_no_prompt_is_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [prompt(f"p{i}", 5, max_tokens=8) for i in range(4)]
    with preempting(monkeypatch, "", PLENTY) as core:
        answers, interrupted = served(core, states)

        assert_answers(answers, states)
        assert (interrupted, core.load().preemptions) == ([], 0)


def test_a_finished_answer_is_not_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    short, long = prompt("short", 5, max_tokens=3), prompt("long", 5, max_tokens=4)
    with preempting(monkeypatch, "engine.preempt=after:3", PLENTY) as core:
        answers, interrupted = served(core, [short, long])

        assert_answers(answers, [short, long])
        assert interrupted == [("long", 1, 0, 3)]


def test_a_prompt_that_is_to_be_handed_off_is_not_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    with preempting(monkeypatch, "engine.preempt=after:1", PLENTY) as core:
        core.add(prompt("held", 20), hold=True)
        while core.has_work():
            core.step()

        assert (core.load().held_prompts, core.load().preemptions) == (1, 0)
        core.release("held")


def test_a_sequence_that_has_ended_does_not_keep_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    state = prompt("two", 6, max_tokens=8, n=2, temperature=1.0, seed=3)
    first, other = wanted(state)[0], wanted(state, 1)
    assert first not in other
    state = replace(state, params=replace(state.params, stop_token_ids=(first,)))
    with preempting(monkeypatch, "engine.preempt=after:4", PLENTY) as core:
        answers, interrupted = served(core, [state])

        assert answers.tokens == {("two", 0): [first], ("two", 1): other}
        assert interrupted == [("two", 1, 0, 1)]


def test_a_prompt_preempted_before_its_first_token_is_not_counted() -> None:
    with engine(replace(CONFIG, num_blocks=12), chunk=2) as (core, _):
        core.add(prompt("old", 10, max_tokens=30))
        core.add(prompt("young", 30, max_tokens=2))
        interrupted: Interrupted = []
        while core.has_work() and not core.load().preemptions:
            interrupted += [(*one, 0) for one in core.step().interrupted]

        assert core.load().preemptions == 1
        assert interrupted == []
        for name in ("old", "young"):
            core.cancel(name)
