"""The progress of a batch: a bar on a terminal, lines elsewhere, and its last message."""

import asyncio
import io
import re

import pytest

import pdserve.batch_run.progress
from batch.runner import BatchProgress
from pdserve.batch_run.progress import ProgressView
from pdserve.batch_run.summary import command_again, counted


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def progress(done: int, *, errors: int = 0, resumed: int = 0, tokens: int = 0) -> BatchProgress:
    return BatchProgress(200, done, errors, resumed, 10 * tokens, tokens)


def test_rates_are_of_this_run_alone() -> None:
    clock = Clock()
    view = ProgressView(stream=io.StringIO(), clock=clock)

    view.take(progress(50, resumed=50, tokens=500))
    clock.now += 20
    view.take(progress(90, errors=3, resumed=50, tokens=700))

    assert view.line() == "90 of 200 lines, 3 errors, 2.0 lines/s, 10.0 tokens/s, 55s left"
    assert view.seconds == 20


def test_before_the_first_line_no_rate_or_time_is_shown() -> None:
    clock = Clock()
    view = ProgressView(stream=io.StringIO(), clock=clock)
    before = view.line()
    view.take(progress(0))
    clock.now += 10

    assert before == "0 lines answered"
    assert view.line() == "0 of 200 lines, 0 errors, 0.0 lines/s, 0.0 tokens/s, ? left"


@pytest.mark.parametrize(("seconds", "shown"), [(75, "1m15s"), (7500, "2h05m"), (9, "9s")])
def test_the_time_left_is_short(seconds: int, shown: str) -> None:
    clock = Clock()
    view = ProgressView(stream=io.StringIO(), clock=clock)

    view.take(progress(0))
    clock.now += seconds
    view.take(progress(100))

    assert view.line().endswith(f" {shown} left")


def _time_left(view: ProgressView) -> str:
    return view.line().rpartition(", ")[2]


def test_the_time_left_appears_after_the_first_concurrent_lines() -> None:
    clock = Clock()
    view = ProgressView(stream=io.StringIO(), clock=clock, max_inflight=8)
    view.take(progress(0))

    shown = []
    for done in range(1, 10):
        clock.now += 10
        view.take(progress(done))
        shown.append(_time_left(view))

    assert shown[:7] == ["? left"] * 7, (
        "the first of many at once show how long one takes, not how many are done a second"
    )
    assert shown[7:] == ["32m00s left", "31m50s left"]


def test_the_time_left_follows_the_last_lines() -> None:
    clock = Clock()
    view = ProgressView(stream=io.StringIO(), clock=clock, max_inflight=4)
    view.take(progress(0))
    for done in range(1, 181):
        clock.now += 1 if done <= 100 else 10
        view.take(progress(done))

    assert _time_left(view) == "3m20s left", "20 lines at 10 s each; the mean of the run gives 1m40s"


def test_the_time_left_grows_while_no_line_is_done() -> None:
    clock = Clock()
    view = ProgressView(stream=io.StringIO(), clock=clock, max_inflight=4)
    view.take(progress(0))
    for done in range(1, 200):
        clock.now += 1
        view.take(progress(done))
    before = _time_left(view)
    clock.now += 600

    assert (before, _time_left(view)) == ("1s left", "10m00s left"), "the last line of 200 hangs"


def test_without_a_terminal_a_plain_line_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdserve.batch_run.progress, "EVERY_S", 0.0)
    reported = asyncio.Event()

    class Lines(io.StringIO):
        def flush(self) -> None:
            if self.getvalue().count("\n") >= 3:
                reported.set()

    stream = Lines()
    view = ProgressView(stream=stream)
    view.take(progress(50))

    async def watch() -> None:
        async with view.kept():
            await asyncio.wait_for(reported.wait(), 30)

    asyncio.run(watch())

    assert {line.partition(",")[0] for line in stream.getvalue().splitlines()} == {"50 of 200 lines"}
    assert "%" not in stream.getvalue()


def test_a_resumed_bar_starts_where_the_earlier_run_stopped() -> None:
    stream, clock = Terminal(), Clock()
    view = ProgressView(stream=stream, clock=clock)

    async def watch() -> None:
        async with view.kept():
            view.take(progress(50, resumed=50))
            clock.now += 10
            view.take(progress(200, errors=7, resumed=50, tokens=40))

    asyncio.run(watch())

    shown = [line for line in re.split(r"[\r\n]+", stream.getvalue()) if line.strip()]
    assert " 25%|" in shown[0]
    assert "50/200 lines [" in shown[0]
    assert "100%|" in shown[-1]
    assert "200/200 lines [" in shown[-1]
    assert "4.0 tokens/s, 0s left, 7 errors]" in shown[-1]


class Gone(Terminal):
    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


def test_a_closed_terminal_ends_nothing() -> None:
    view = ProgressView(stream=Gone(), clock=Clock())

    async def watch() -> None:
        async with view.kept():
            view.take(progress(50))
            view.take(progress(60))

    asyncio.run(watch())

    assert view.line().startswith("60 of 200 lines")


def test_a_busy_server_is_shown_with_the_concurrency() -> None:
    view = ProgressView(stream=io.StringIO(), clock=Clock())

    view.take(BatchProgress(200, 90, 0, 0, 0, 0, at_once=12))

    assert view.line().endswith(", at most 12 at once: the server is busy")


def test_the_resume_command_has_no_secret_in_it() -> None:
    argv = ["-i", "a b.jsonl", "-o", "https://b.example/out?X-Amz-Signature=5ec3e7", "--api-key", "sk-1"]
    argv += ["--api-key=sk-2", "--base-url=http://user:word@h:1"]

    again = command_again(("pdserve", "run-batch"), argv)

    assert again.startswith("pdserve run-batch -i 'a b.jsonl' -o 'https://b.example/out?(hidden)' --api-key KEY")
    assert not {"5ec3e7", "sk-1", "sk-2", "word"} & set(re.split(r"[^\w-]+", again))


@pytest.mark.parametrize(
    ("done", "errors", "message"),
    [(1, 0, "1 line answered (0 errors) in 2.0 s, 3.0 tokens/s"), (1200, 1, "1,200 lines answered (1 error) in")],
)
def test_the_last_message_has_the_counts(done: int, errors: int, message: str) -> None:
    assert counted(done, errors, 2.0, 3.0).startswith(message)


@pytest.mark.parametrize(
    "word",
    ["--api_key=sk-secret", "--api-key=sk-secret", "-ihttps://b.example/f?A=1&Sig=sk-secret",
     "-o=https://b.example/f?A=1&Sig=sk-secret", "--input_file=https://b.example/f?A=1&Sig=sk-secret"],
)  # fmt: skip
def test_a_secret_is_shown_in_no_spelling_of_its_flag(word: str) -> None:
    assert "secret" not in command_again(("pdserve", "run-batch"), [word, "--model", "m"])


def test_a_key_after_its_flag_is_hidden_in_every_spelling() -> None:
    assert command_again(("b",), ["--api_key", "sk-secret", "-iin", "-oout"]) == "b --api_key KEY -iin -oout"
