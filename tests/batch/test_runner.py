"""A run answers every line once, in the order of the input, and leaves only its output."""

import asyncio
from typing import Any

import pytest

from batch.backend import Answer
from batch.job import BatchJob, BatchStopped
from batch.prepared_job import prepare
from batch.runner import BatchProgress, run_batch
from tests.batch.scripted import NUM_LINES, Scripted, echo, json_answer, line, plain, read_lines, run_job, write_lines

pytestmark = pytest.mark.anyio


def _with_lines(job: BatchJob, *lines: dict[str, Any]) -> BatchJob:
    write_lines(job.input_path, lines)
    return job


async def test_each_line_has_its_answer_in_the_order_of_the_input(job: BatchJob) -> None:
    backend = Scripted()

    progress = await run_job(job, backend)

    lines = read_lines(job.output_path)
    assert [one["custom_id"] for one in lines] == [f"request-{n}" for n in range(NUM_LINES)]
    assert [one["response"]["body"]["echo"] for one in lines] == list(range(NUM_LINES))
    assert len({one["id"] for one in lines} | {one["response"]["request_id"] for one in lines}) == 2 * NUM_LINES
    assert set(backend.requests.values()) == {1}
    assert progress == BatchProgress(NUM_LINES, NUM_LINES, 0, 0, 3 * NUM_LINES, 2 * NUM_LINES)


async def test_answers_in_another_order_change_nothing(job: BatchJob) -> None:
    class Backwards(Scripted):
        async def _wait(self) -> None:
            for _ in range(NUM_LINES - max(self.requests)):
                await asyncio.sleep(0)

    await run_job(job, Backwards())

    assert [one["response"]["body"]["echo"] for one in read_lines(job.output_path)] == list(range(NUM_LINES))


async def test_a_run_leaves_its_output_and_nothing_else(job: BatchJob) -> None:
    await run_job(job, Scripted())

    assert sorted(path.name for path in job.output_path.parent.iterdir()) == ["err.jsonl", "in.jsonl", "out.jsonl"]
    assert job.error_path is not None
    assert job.error_path.read_bytes() == b""


async def test_as_many_lines_as_allowed_are_in_flight(job: BatchJob) -> None:
    backend = Scripted()

    await run_job(job, backend)

    assert backend.peak == 4


async def test_progress_counts_each_line_from_the_start(job: BatchJob) -> None:
    seen: list[BatchProgress] = []
    with prepare(job) as prepared:
        last = await run_batch(prepared, Scripted(), on_progress=seen.append)

    assert [progress.done for progress in seen] == list(range(NUM_LINES + 1))
    assert seen[-1] == last


async def test_an_empty_input_makes_an_empty_output(job: BatchJob) -> None:
    progress = await run_job(_with_lines(job), Scripted())

    assert job.output_path.read_bytes() == b""
    assert progress == BatchProgress(0, 0, 0, 0, 0, 0)


async def test_the_same_job_run_again_makes_the_same_file(job: BatchJob) -> None:
    await run_job(job, Scripted())
    first = plain(job.output_path)

    await run_job(job, Scripted())

    assert plain(job.output_path) == first


async def test_the_outputs_request_id_is_the_one_sent(job: BatchJob) -> None:
    backend = Scripted()
    await run_job(job, backend)

    requested = {headers["x-request-id"] for headers in backend.headers}
    assert requested == {one["response"]["request_id"] for one in read_lines(job.output_path)}


async def test_failed_lines_are_in_the_output_and_the_error_file(job: BatchJob) -> None:
    def script(n: Any, times: int) -> Answer:
        error = {"message": "no", "type": "not_found_error", "param": "model", "code": 404}
        return json_answer({"error": error}, 404) if n % 10 == 3 else echo(n)

    progress = await run_job(job, Scripted(script))

    assert job.error_path is not None
    lines, errors = read_lines(job.output_path), read_lines(job.error_path)
    assert [one for one in lines if one["error"] is not None] == errors
    assert [one["custom_id"] for one in errors] == ["request-3", "request-13", "request-23"]
    assert (len(lines), progress.errors) == (NUM_LINES, 3)
    assert progress.first_error in [f"{one['custom_id']!r}: {one['error']['message']}" for one in errors]


async def test_the_first_errors_message_is_fit_for_a_terminal(job: BatchJob) -> None:
    def script(n: int, count: int) -> Answer:
        return json_answer({"error": {"message": "no \x1b[31m model\nof this name", "type": "x"}}, 404)

    hostile = line(0) | {"custom_id": "a\x1b[2J\u202eb"}

    progress = await run_job(_with_lines(job, hostile), Scripted(script))

    assert progress.first_error == "'a [2J b': no  [31m model of this name"


async def test_lines_with_misspelt_fields_are_counted_by_warning(job: BatchJob) -> None:
    misspelt = "{0} is not a known field and has no effect: did you mean max_tokens?"

    def script(n: Any, times: int) -> Answer:
        named = ["max_token"] * (n % 2) + ["max_tokenz"] * (n % 3 == 0) + [f"max_tokens{n}", "\x1b[2J"]
        return json_answer({"usage": {}}, warning=f'199 pdserve "{", ".join(misspelt.format(name) for name in named)}"')

    progress = await run_job(job, Scripted(script))

    assert progress.warnings[misspelt.format("max_token")] == NUM_LINES // 2
    assert progress.warnings[misspelt.format("max_tokenz")] == NUM_LINES // 3
    assert len(progress.warnings) == 20
    assert "\x1b" not in "".join(progress.warnings)


# Lines that get no request, or whose answer is an error


async def test_a_line_that_cannot_be_sent_fails_alone(job: BatchJob) -> None:
    backend = Scripted()
    _with_lines(job, line(0), line(1, url="/bad_url"), line(2, method="GET"), line(3, body=[]), line(4))

    await run_job(job, backend)

    assert [one["response"]["status_code"] for one in read_lines(job.output_path)] == [200, 400, 400, 400, 200]
    assert set(backend.requests) == {0, 4}


async def test_a_server_that_refuses_the_key_ends_the_run(job: BatchJob) -> None:
    with pytest.raises(BatchStopped, match=r"refuses the API key \(401\); 0 of 30 lines"):
        await run_job(job, Scripted(lambda n, times: json_answer({"error": {"message": "key"}}, 401)))

    assert not job.output_path.exists()


async def test_a_failing_progress_display_is_not_a_journal_error(job: BatchJob) -> None:
    def gone(progress: BatchProgress) -> None:
        if progress.done == 5:
            raise BrokenPipeError("nobody looks")

    with prepare(job) as prepared, pytest.raises(BrokenPipeError, match="nobody looks"):
        await run_batch(prepared, Scripted(), on_progress=gone)

    assert (await run_job(job, Scripted())).resumed >= 5
