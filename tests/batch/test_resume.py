"""A run that ends early loses no answer: the same job continues from there."""

import asyncio
import errno
import json
import os
import re
import threading

import pytest

from batch.job import BatchJob, BatchStopped
from batch.prepared_job import PreparedJob, prepare
from batch.results import write_results
from batch.runner import BatchProgress, run_batch
from tests.batch.app_server import DEADLINE_S
from tests.batch.scripted import NUM_LINES, Scripted, ignore, json_answer, line, read_lines, run_job, write_lines

pytestmark = pytest.mark.anyio


async def test_a_cancelled_run_cancels_requests_and_keeps_answers(job: BatchJob) -> None:
    backend = Scripted()
    with prepare(job) as prepared:

        def progressed(progress: BatchProgress) -> None:
            if progress.done == 8 and backend.hold is None:
                backend.hold = asyncio.Event()
                backend.holding.clear()

        running = asyncio.ensure_future(run_batch(prepared, backend, on_progress=progressed))
        async with asyncio.timeout(DEADLINE_S):
            while backend.hold is None:  # noqa: ASYNC110 - set by the run itself
                await asyncio.sleep(0)
            await backend.holding.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
    done = NUM_LINES - prepared.left

    assert (backend.now, job.output_path.exists()) == (0, False)
    assert backend.cancelled > 0
    again = Scripted()
    assert (await run_job(job, again)).resumed == done >= 8
    assert sum(again.requests.values()) == NUM_LINES - done
    assert [one["response"]["body"]["echo"] for one in read_lines(job.output_path)] == list(range(NUM_LINES))


async def test_the_error_of_a_server_that_is_gone_is_quoted(job: BatchJob) -> None:
    error = {"error": {"message": "no decode instance is ready"}}

    with pytest.raises(BatchStopped, match="answers 503: no decode instance is ready, and /health answers 503; 0 of"):
        await run_job(job, Scripted(lambda n, times: json_answer(error, 503), probe=503))


async def test_a_run_cancelled_while_it_writes_the_output_can_be_resumed(
    job: BatchJob, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    writing = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(prepared: PreparedJob, gives_up: threading.Event) -> bool:
        loop.call_soon_threadsafe(writing.set)
        assert gives_up.wait(DEADLINE_S)
        return write_results(prepared, gives_up)

    monkeypatch.setattr("batch.runner.write_results", slow)
    running = asyncio.ensure_future(run_job(job, Scripted()))
    async with asyncio.timeout(DEADLINE_S):
        await writing.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    monkeypatch.undo()

    assert sorted(path.name for path in job.output_path.parent.iterdir()) == ["in.jsonl", "out.jsonl.journal"]
    assert (await run_job(job, Scripted())).resumed == NUM_LINES


async def test_a_run_cancelled_after_its_output_has_succeeded(
    job: BatchJob, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    written = asyncio.Event()
    loop = asyncio.get_running_loop()

    def late(prepared: PreparedJob, gives_up: threading.Event) -> bool:
        whole = write_results(prepared, gives_up)
        loop.call_soon_threadsafe(written.set)
        assert gives_up.wait(DEADLINE_S)
        return whole

    monkeypatch.setattr("batch.runner.write_results", late)
    running = asyncio.ensure_future(run_job(job, Scripted()))
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
            if max(self.requests) > 0:
                await asyncio.Event().wait()

    with prepare(job) as prepared:
        monkeypatch.setattr(os, "fsync", broken)
        monkeypatch.setattr("batch.runner._SYNC_EVERY_S", 0.0)
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(BatchStopped, match="journal: Input/output error; 1 of 30 lines are answered"):
                await run_batch(prepared, First(), on_progress=ignore)
        monkeypatch.undo()

    assert (await run_job(job, Scripted())).resumed == 1


async def test_a_run_with_nothing_left_sends_no_request(job: BatchJob, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> bool:
        raise OSError(28, "No space left on device", str(job.output_path))

    monkeypatch.setattr("batch.runner.write_results", broken)
    with pytest.raises(BatchStopped, match=r"No space left on device; 30 of 30 lines are answered"):
        await run_job(job, Scripted())
    monkeypatch.undo()

    again = Scripted()
    with prepare(job) as prepared:
        assert prepared.left == 0
        progress = await run_batch(prepared, again, on_progress=ignore)

    assert (progress.resumed, sum(again.requests.values())) == (NUM_LINES, 0)
    assert len(read_lines(job.output_path)) == NUM_LINES


async def test_an_input_that_changes_during_the_run_ends_it(job: BatchJob) -> None:
    with prepare(job) as prepared:
        text = job.input_path.read_text()
        with job.input_path.open("r+") as file:
            file.write(re.sub("request-5", "request-X", text))

        with pytest.raises(BatchStopped, match="line 6 was changed while the run read it; "):
            await run_batch(prepared, Scripted(), on_progress=ignore)


async def test_an_input_that_is_replaced_during_the_run_does_not_matter(job: BatchJob) -> None:
    with prepare(job) as prepared:
        other = write_lines(job.input_path.with_name("other"), [line(99)])
        other.rename(job.input_path)
        await run_batch(prepared, Scripted(), on_progress=ignore)

    assert len(read_lines(job.output_path)) == NUM_LINES


async def test_a_raising_callback_ends_the_run_resumably(job: BatchJob) -> None:
    def broken(progress: BatchProgress) -> None:
        if progress.done == 5:
            raise ZeroDivisionError

    with prepare(job) as prepared, pytest.raises(ZeroDivisionError):
        await run_batch(prepared, Scripted(), on_progress=broken)

    assert (await run_job(job, Scripted())).resumed >= 5
    assert json.loads(job.output_path.read_text().splitlines()[0])["custom_id"] == "request-0"
