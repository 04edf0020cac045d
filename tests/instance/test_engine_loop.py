"""The engine thread outlives whatever the work and the results of single requests do to it."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from engine.interface import StepResult
from instance.engine_loop import EngineLoop
from tests.engine.fake_engines import engine, prompt

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


def test_a_result_that_cannot_be_told_ends_nothing_but_its_own_telling() -> None:
    finished = threading.Event()

    def on_step(result: StepResult) -> None:
        if any(token.prompt_id == "bad" for token in result.tokens):
            raise RuntimeError("this one cannot be told")
        if any(token.finish for token in result.tokens):
            finished.set()

    with looping(on_step) as loop:
        loop.post(lambda core: core.add(prompt("bad", 3, max_tokens=2)))
        loop.post(lambda core: core.add(prompt("good", 3, max_tokens=5)))

        assert finished.wait(DEADLINE_S)
        assert loop.alive()


@pytest.mark.parametrize("what", ["has_work", "step"])
def test_an_engine_that_raises_is_asked_again_without_spinning(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
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

    with looping(lambda result: finished.set() if any(token.finish for token in result.tokens) else None) as loop:
        loop.post(lambda core: core.add(prompt("p", 3, max_tokens=5)))
        assert finished.wait(DEADLINE_S)

    assert loop.step_tokens.sum == 3 + 4, "the prompt, then each output token but the last"
    assert loop.step_tokens.buckets((1, 8)) == [("1.0", 4), ("8.0", 5), ("+Inf", 5)]


def test_posted_work_that_raises_does_not_keep_the_rest_from_running() -> None:
    done = threading.Event()

    with looping(lambda result: None) as loop:
        loop.post(lambda core: core.add(prompt("p", 10_000)))
        loop.post(lambda core: done.set())

        assert done.wait(DEADLINE_S)


def test_the_slowest_turn_is_of_the_largest_chunk() -> None:
    ticks, finished = iter(range(1_000_000)), threading.Event()

    def on_step(result: StepResult) -> None:
        if any(token.finish for token in result.tokens):
            finished.set()

    with engine() as (core, _):
        loop = EngineLoop(
            core, clock=lambda: float(next(ticks)), on_layer=lambda layer, chunks: None, on_step=on_step,
            chunk_tokens=512,
        )  # fmt: skip
        loop.start()
        loop.post(lambda core: core.add(prompt("p", 3, max_tokens=5)))
        assert finished.wait(DEADLINE_S)
        assert loop.stop(DEADLINE_S)

    assert loop.slowest_turn_s == 512.0, "each turn lasts a second of this clock, and one token may be 512"
