"""A run answers every line once, in order; it waits out what passes, and what ends it early loses no answer."""

import asyncio
import contextlib
import errno
import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batch.answering import Answer
from batch.job import BatchJob, BatchStopped
from batch.prepared import Prepared, prepare
from batch.results import write_results
from batch.runner import Progress, run_batch
from tests.batch.app_server import DEADLINE_S
from tests.batch.scripted import AT_ONCE, Scripted, echo, ignore, line, plain, read_lines, says, write_lines
from wire.errors import Unavailable

pytestmark = pytest.mark.anyio
NUM_LINES = 30


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where many examples run, one after the other."""
    return tmp_path_factory.mktemp("examples")


@pytest.fixture
def job(tmp_path: Path) -> BatchJob:
    """A job over lines whose `n` count up."""
    source = write_lines(tmp_path / "in.jsonl", map(line, range(NUM_LINES)))
    return BatchJob(source, tmp_path / "out.jsonl", tmp_path / "err.jsonl", max_inflight=4, retries=AT_ONCE)


def _with_lines(job: BatchJob, *lines: dict[str, Any]) -> BatchJob:
    write_lines(job.input_path, lines)
    return job


async def _run(job: BatchJob, answerer: Scripted) -> Progress:
    with prepare(job) as prepared:
        return await run_batch(prepared, answerer, on_progress=ignore)


async def test_each_line_has_its_answer_in_the_order_of_the_input(job: BatchJob) -> None:
    answerer = Scripted()

    progress = await _run(job, answerer)

    lines = read_lines(job.output_path)
    assert [one["custom_id"] for one in lines] == [f"request-{n}" for n in range(NUM_LINES)]
    assert [one["response"]["body"]["echo"] for one in lines] == list(range(NUM_LINES))
    assert len({one["id"] for one in lines} | {one["response"]["request_id"] for one in lines}) == 2 * NUM_LINES
    assert set(answerer.asked.values()) == {1}
    assert progress == Progress(NUM_LINES, NUM_LINES, 0, 0, 3 * NUM_LINES, 2 * NUM_LINES)


async def test_answers_that_come_in_another_order_change_nothing(job: BatchJob) -> None:
    class Backwards(Scripted):
        async def _wait(self) -> None:
            for _ in range(NUM_LINES - max(self.asked)):
                await asyncio.sleep(0)

    await _run(job, Backwards())

    assert [one["response"]["body"]["echo"] for one in read_lines(job.output_path)] == list(range(NUM_LINES))


async def test_a_run_leaves_its_output_and_nothing_else(job: BatchJob) -> None:
    await _run(job, Scripted())

    assert sorted(path.name for path in job.output_path.parent.iterdir()) == ["err.jsonl", "in.jsonl", "out.jsonl"]
    assert job.error_path is not None
    assert job.error_path.read_bytes() == b""


async def test_as_many_lines_as_allowed_are_asked_at_once(job: BatchJob) -> None:
    answerer = Scripted()

    await _run(job, answerer)

    assert answerer.most == 4


async def test_progress_counts_each_line_from_the_start(job: BatchJob) -> None:
    seen: list[Progress] = []
    with prepare(job) as prepared:
        last = await run_batch(prepared, Scripted(), on_progress=seen.append)

    assert [progress.done for progress in seen] == list(range(NUM_LINES + 1))
    assert seen[-1] == last


async def test_an_empty_input_makes_an_empty_output(job: BatchJob) -> None:
    progress = await _run(_with_lines(job), Scripted())

    assert job.output_path.read_bytes() == b""
    assert progress == Progress(0, 0, 0, 0, 0, 0)


async def test_the_same_job_run_again_makes_the_same_file(job: BatchJob) -> None:
    await _run(job, Scripted())
    first = plain(job.output_path)

    await _run(job, Scripted())

    assert plain(job.output_path) == first


async def test_the_request_id_of_the_output_is_the_one_that_was_asked_with(job: BatchJob) -> None:
    answerer = Scripted()
    await _run(job, answerer)

    asked = {headers["x-request-id"] for headers in answerer.headers}
    assert asked == {one["response"]["request_id"] for one in read_lines(job.output_path)}


async def test_failed_lines_stand_in_the_output_and_in_the_file_of_errors(job: BatchJob) -> None:
    def script(n: Any, times: int) -> Answer:
        error = {"message": "no", "type": "not_found_error", "param": "model", "code": 404}
        return says({"error": error}, 404) if n % 10 == 3 else echo(n)

    progress = await _run(job, Scripted(script))

    assert job.error_path is not None
    lines, errors = read_lines(job.output_path), read_lines(job.error_path)
    assert [one for one in lines if one["error"] is not None] == errors
    assert [one["custom_id"] for one in errors] == ["request-3", "request-13", "request-23"]
    assert (len(lines), progress.errors) == (NUM_LINES, 3)


# Lines that are not asked, or whose answer is an error


async def test_a_line_that_cannot_be_asked_is_its_own_error_and_the_others_run(job: BatchJob) -> None:
    answerer = Scripted()
    _with_lines(job, line(0), line(1, url="/bad_url"), line(2, method="GET"), line(3, body=[]), line(4))

    await _run(job, answerer)

    assert [one["response"]["status_code"] for one in read_lines(job.output_path)] == [200, 400, 400, 400, 200]
    assert set(answerer.asked) == {0, 4}


async def test_a_server_that_refuses_the_key_ends_the_run(job: BatchJob) -> None:
    with pytest.raises(BatchStopped, match=r"refuses the API key \(401\); 0 of 30 lines"):
        await _run(job, Scripted(lambda n, times: says({"error": {"message": "key"}}, 401)))

    assert not job.output_path.exists()


# What passes is waited out


@pytest.mark.parametrize(
    "passing",
    [says({}, 429), says({}, 408), says({}, 502), says({}, 503), says({}, 504), Unavailable("the connection was lost")],
)
async def test_what_passes_is_asked_again(job: BatchJob, passing: Answer | Exception) -> None:
    answerer = Scripted(lambda n, times: passing if n == 7 and times < 3 else echo(n))

    progress = await _run(job, answerer)

    assert answerer.asked[7] == 3
    assert progress.errors == 0


async def test_a_line_that_never_gets_an_answer_of_a_well_server_is_its_own_error(job: BatchJob) -> None:
    answerer = Scripted(lambda n, times: Unavailable("the connection was lost") if n == 7 else echo(n))

    await _run(job, answerer)

    bad = read_lines(job.output_path)[7]
    assert bad["response"]["status_code"] == 503
    assert bad["error"]["message"] == "the connection was lost"
    assert answerer.asked[7] == AT_ONCE.attempts


async def test_the_last_answer_of_a_line_that_is_always_refused_is_its_error(job: BatchJob) -> None:
    full = says(
        {"error": {"message": "the queue is full", "type": "rate_limit_error", "param": None, "code": 429}}, 429
    )
    answerer = Scripted(lambda n, times: full if n == 7 else echo(n), probe=404)

    await _run(job, answerer)

    bad = read_lines(job.output_path)[7]
    assert (bad["response"]["status_code"], bad["error"]["message"]) == (429, "the queue is full")
    assert answerer.asked[7] == AT_ONCE.busy_attempts


@pytest.mark.parametrize("probe", [503, 500, Unavailable("nobody")])
async def test_a_server_that_is_gone_ends_the_run_and_not_its_lines(job: BatchJob, probe: int | Exception) -> None:
    answerer = Scripted(lambda n, times: echo(n) if n < 10 else Unavailable("no connection"), probe=probe)

    with pytest.raises(BatchStopped, match=r"no connection, and .* 10 of 30 lines are answered and kept in .*journal"):
        await _run(job, answerer)

    assert not job.output_path.exists()
    again = Scripted()
    assert (await _run(job, again)).resumed == 10
    assert set(again.asked) == set(range(10, NUM_LINES))


# Ended early and taken up again


async def test_a_cancelled_run_takes_its_asks_back_and_keeps_what_it_has(job: BatchJob) -> None:
    answerer = Scripted()
    with prepare(job) as prepared:

        def progressed(progress: Progress) -> None:
            if progress.done == 8 and answerer.hold is None:
                answerer.hold = asyncio.Event()
                answerer.holding.clear()

        running = asyncio.ensure_future(run_batch(prepared, answerer, on_progress=progressed))
        async with asyncio.timeout(DEADLINE_S):
            while answerer.hold is None:  # noqa: ASYNC110 - set by the run itself
                await asyncio.sleep(0)
            await answerer.holding.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
    done = NUM_LINES - prepared.left

    assert (answerer.now, job.output_path.exists()) == (0, False)
    assert answerer.cancelled > 0
    again = Scripted()
    assert (await _run(job, again)).resumed == done >= 8
    assert sum(again.asked.values()) == NUM_LINES - done
    assert [one["response"]["body"]["echo"] for one in read_lines(job.output_path)] == list(range(NUM_LINES))


async def test_a_server_that_is_gone_is_quoted(job: BatchJob) -> None:
    error = {"error": {"message": "no decode instance is ready"}}

    with pytest.raises(BatchStopped, match="answers 503, no decode instance is ready, and /health answers 503; 0 of"):
        await _run(job, Scripted(lambda n, times: says(error, 503), probe=503))


async def test_a_run_cancelled_while_it_writes_the_output_is_taken_up(
    job: BatchJob, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    writing = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(prepared: Prepared, gives_up: threading.Event) -> bool:
        loop.call_soon_threadsafe(writing.set)
        assert gives_up.wait(DEADLINE_S)
        return write_results(prepared, gives_up)

    monkeypatch.setattr("batch.runner.write_results", slow)
    running = asyncio.ensure_future(_run(job, Scripted()))
    async with asyncio.timeout(DEADLINE_S):
        await writing.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    monkeypatch.undo()

    assert sorted(path.name for path in job.output_path.parent.iterdir()) == ["in.jsonl", "out.jsonl.journal"]
    assert (await _run(job, Scripted())).resumed == NUM_LINES


async def test_a_run_cancelled_once_the_output_stands_has_ended_well(
    job: BatchJob, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    written = asyncio.Event()
    loop = asyncio.get_running_loop()

    def late(prepared: Prepared, gives_up: threading.Event) -> bool:
        whole = write_results(prepared, gives_up)
        loop.call_soon_threadsafe(written.set)
        assert gives_up.wait(DEADLINE_S)
        return whole

    monkeypatch.setattr("batch.runner.write_results", late)
    running = asyncio.ensure_future(_run(job, Scripted()))
    async with asyncio.timeout(DEADLINE_S):
        await written.wait()
        running.cancel()

        assert (await running).done == NUM_LINES
    assert len(read_lines(job.output_path)) == NUM_LINES


async def test_a_disk_that_fails_under_the_journal_ends_the_run(job: BatchJob, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    class First(Scripted):
        async def _wait(self) -> None:
            if max(self.asked) > 0:
                await asyncio.Event().wait()

    with prepare(job) as prepared:
        monkeypatch.setattr(os, "fsync", broken)
        monkeypatch.setattr("batch.runner._SYNC_EVERY_S", 0.0)
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(BatchStopped, match="journal: Input/output error; 1 of 30 lines are answered"):
                await run_batch(prepared, First(), on_progress=ignore)
        monkeypatch.undo()

    assert (await _run(job, Scripted())).resumed == 1


async def test_a_run_with_nothing_left_asks_nobody(job: BatchJob, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> bool:
        raise OSError(28, "No space left on device", str(job.output_path))

    monkeypatch.setattr("batch.runner.write_results", broken)
    with pytest.raises(BatchStopped, match=r"No space left on device; 30 of 30 lines are answered"):
        await _run(job, Scripted())
    monkeypatch.undo()

    again = Scripted()
    with prepare(job) as prepared:
        assert prepared.left == 0
        progress = await run_batch(prepared, again, on_progress=ignore)

    assert (progress.resumed, sum(again.asked.values())) == (NUM_LINES, 0)
    assert len(read_lines(job.output_path)) == NUM_LINES


async def test_an_input_that_changes_under_the_run_ends_it(job: BatchJob) -> None:
    with prepare(job) as prepared:
        text = job.input_path.read_text()
        with job.input_path.open("r+") as file:
            file.write(re.sub("request-5", "request-X", text))

        with pytest.raises(BatchStopped, match="line 6 was changed while the run read it; "):
            await run_batch(prepared, Scripted(), on_progress=ignore)


async def test_an_input_that_is_replaced_under_the_run_does_not_matter(job: BatchJob) -> None:
    with prepare(job) as prepared:
        other = write_lines(job.input_path.with_name("other"), [line(99)])
        other.rename(job.input_path)
        await run_batch(prepared, Scripted(), on_progress=ignore)

    assert len(read_lines(job.output_path)) == NUM_LINES


async def test_what_a_callback_raises_ends_the_run_resumable(job: BatchJob) -> None:
    def broken(progress: Progress) -> None:
        if progress.done == 5:
            raise ZeroDivisionError

    with prepare(job) as prepared, pytest.raises(ZeroDivisionError):
        await run_batch(prepared, Scripted(), on_progress=broken)

    assert (await _run(job, Scripted())).resumed >= 5
    assert json.loads(job.output_path.read_text().splitlines()[0])["custom_id"] == "request-0"


# Whatever comes


STATUSES = st.sampled_from([200, 200, 200, 201, 400, 404, 408, 429, 500, 502, 503, 504, 0])


@settings(max_examples=25)
@given(st.lists(st.tuples(STATUSES, st.integers(1, 4), st.booleans()), max_size=12), st.integers(1, 5), st.data())
def test_l4_every_line_is_answered_once_in_order_whatever_is_answered_and_whenever_it_is_stopped(
    place: Path, plan: list[tuple[int, int, bool]], inflight: int, data: st.DataObject
) -> None:  # fmt: skip
    """`plan`: of each line the status (0: nobody answers) of its first tries, how many, and whether it can be asked."""
    lines = [line(n) if can_be_asked else line(n, url="/nowhere") for n, (_, _, can_be_asked) in enumerate(plan)]
    job = BatchJob(
        write_lines(place / "in", lines), place / "out", place / "err", max_inflight=inflight, retries=AT_ONCE
    )
    stops_at = data.draw(st.none() | st.integers(0, len(plan)))

    def script(n: int, times: int) -> Answer | Exception:
        status, tries, _ = plan[n]
        bad: Answer | Exception = says({"error": {"message": "m"}}, status) if status else Unavailable("lost")
        return bad if times <= tries and status not in (200, 201) else echo(n)

    def stop(progress: Progress) -> None:
        if progress.done == stops_at:
            raise ZeroDivisionError

    for callback in (stop, ignore):
        with contextlib.suppress(ZeroDivisionError), prepare(job) as prepared:
            asyncio.run(run_batch(prepared, Scripted(script), on_progress=callback))

    found = read_lines(job.output_path)
    assert [one["custom_id"] for one in found] == [f"request-{n}" for n in range(len(plan))]
    assert read_lines(place / "err") == [one for one in found if one["error"] is not None]
    for one, (status, tries, can_be_asked) in zip(found, plan, strict=True):
        passes = status in (200, 201) or (status in (0, 408, 502, 503, 504) and tries < AT_ONCE.attempts)
        is_good = can_be_asked and (passes or (status == 429 and tries < AT_ONCE.busy_attempts))
        assert (one["error"] is None) == is_good, (one, status, tries)
    assert sorted(os.listdir(place)) == ["err", "in", "out"]
