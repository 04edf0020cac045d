"""The engine thread survives errors in the work and the results of single requests."""

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from engine.interface import Engine, StepResult
from instance.engine_loop import EngineLoop
from tests.engine.fake_engines import engine, prompt
from wire.types import PromptState

DEADLINE_S = 300.0


@contextmanager
def looping(on_step: Callable[[StepResult], None]) -> Iterator[EngineLoop]:
    with engine() as (core, _):
        loop = EngineLoop(core, clock=time.monotonic, on_layer=lambda layer, chunks: None, on_step=on_step)
        loop.start()
        try:
            yield loop
        finally:
            assert loop.stop(DEADLINE_S)


def test_a_result_that_cannot_be_sent_affects_no_other_request() -> None:
    finished = threading.Event()

    def on_step(result: StepResult) -> None:
        if any(token.prompt_id == "bad" for token in result.tokens):
            raise RuntimeError("this one cannot be sent")
        if any(token.finish for token in result.tokens):
            finished.set()

    with looping(on_step) as loop:
        loop.post(lambda core: core.add(prompt("bad", 3, max_tokens=2)))
        loop.post(lambda core: core.add(prompt("good", 3, max_tokens=5)))

        assert finished.wait(DEADLINE_S)
        assert loop.alive()


@pytest.mark.parametrize("what", ["has_work", "step"])
def test_an_engine_that_raises_is_retried_without_spinning(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, healed = [0], threading.Event()

    with looping(lambda result: healed.set() if any(token.finish for token in result.tokens) else None) as loop:

        def break_it(core: object) -> None:
            whole = getattr(core, what)

            def fail(*args: object) -> object:
                calls[0] += 1
                if calls[0] <= 2:
                    raise RuntimeError("broken")
                return whole(*args)

            monkeypatch.setattr(core, what, fail)

        loop.post(break_it)
        loop.post(lambda core: core.add(prompt("p", 3, max_tokens=5)))

        assert healed.wait(DEADLINE_S)
        monkeypatch.undo()


def test_the_tokens_of_each_step_are_counted() -> None:
    finished = threading.Event()

    def note(result: StepResult) -> None:
        if any(token.prompt_id == "p" and token.finish for token in result.tokens):
            finished.set()

    with looping(note) as loop:
        loop.post(lambda core: core.add(replace(prompt("probe", 7, max_tokens=2), probe=True)))
        loop.post(lambda core: core.add(prompt("p", 3, max_tokens=5)))
        assert finished.wait(DEADLINE_S)

    assert loop.step_tokens.sum == 3 + 5, "must count the prompt and each output token, as vLLM does, and no probe"
    assert loop.step_tokens.buckets((1, 8)) == [("1.0", 4), ("8.0", 5), ("+Inf", 5)]


def test_posted_work_that_raises_does_not_stop_the_rest() -> None:
    done = threading.Event()

    with looping(lambda result: None) as loop:
        loop.post(lambda core: core.add(prompt("p", 10_000)))
        loop.post(lambda core: done.set())

        assert done.wait(DEADLINE_S)


def _add(state: PromptState, core: Engine) -> None:
    core.add(state)


class Ticks:
    """A clock on which each turn lasts a second; it records the report made during each."""

    def __init__(self) -> None:
        self.loop: EngineLoop | None = None
        self.now = 0.0
        self.reported: set[float] = set()

    def __call__(self) -> float:
        if self.loop is not None:
            self.reported.add(self.loop.slowest_turn_s)
        self.now += 1.0
        return self.now


@pytest.mark.parametrize(("lengths", "slowest_s"), [((1,), 1.0), ((1, 20), 20.0), ((1, 90), 64.0)])
def test_the_slowest_turn_belongs_to_the_current_chunk(lengths: tuple[int, ...], slowest_s: float) -> None:
    finished, clock = threading.Semaphore(0), Ticks()

    def on_step(result: StepResult) -> None:
        if any(token.finish for token in result.tokens):
            finished.release()

    with engine(tokens=512, chunk=512) as (core, _):
        loop = clock.loop = EngineLoop(
            core, clock=clock, on_layer=lambda layer, chunks: None, on_step=on_step, chunk_tokens=64
        )
        loop.start()
        for length in lengths:
            state = prompt(f"of {length}", length, max_tokens=5)
            loop.post(functools.partial(_add, state))
            assert finished.acquire(timeout=DEADLINE_S)
        assert loop.stop(DEADLINE_S)

    assert max(clock.reported) == slowest_s, "a decode step must not count for a finished chunk"
    assert loop.slowest_turn_s == 1.0


@pytest.mark.parametrize(("turn_s", "age_s", "is_stuck"), [(0.1, 9.0, False), (0.1, 11.0, True), (5.0, 19.0, False),
                                                           (5.0, 21.0, True), (900.0, 121.0, True)])  # fmt: skip
def test_an_engine_is_stuck_relative_to_its_turn_times(turn_s: float, age_s: float, is_stuck: bool) -> None:
    now = [0.0]
    with engine() as (core, model):
        loop = EngineLoop(core, clock=lambda: now[0], on_layer=lambda layer, chunks: None, on_step=lambda result: None)
        launch = model.launch

        def slow(*args: object) -> object:
            now[0] += turn_s
            return launch(*args)  # type: ignore[arg-type]

        model.launch = slow  # type: ignore[assignment]
        core.add(prompt("p", 3, max_tokens=1))
        loop._run_turn()
        now[0] += age_s

        assert loop.is_stuck(10.0) is is_stuck
