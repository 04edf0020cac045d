"""Transient failures are waited out; others become the line's error while the server is healthy, or end the run."""

import pytest

from batch.backend import Answer
from batch.job import BatchJob, BatchStopped
from tests.batch.scripted import AT_ONCE, NUM_LINES, Scripted, echo, json_answer, read_lines, run_job
from wire.errors import Unavailable

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    "passing",
    [
        json_answer({}, 429),
        json_answer({}, 408),
        json_answer({}, 502),
        json_answer({}, 503),
        json_answer({}, 504),
        json_answer({}, 529),
        Unavailable("the connection was lost"),
    ],
)
async def test_transient_failures_are_retried(job: BatchJob, passing: Answer | Exception) -> None:
    backend = Scripted(lambda n, times: passing if n == 7 and times < 3 else echo(n))

    progress = await run_job(job, backend)

    assert backend.requests[7] == 3
    assert progress.errors == 0


async def test_an_unanswered_line_of_a_healthy_server_fails_alone(job: BatchJob) -> None:
    backend = Scripted(lambda n, times: Unavailable("the connection was lost") if n == 7 else echo(n))

    await run_job(job, backend)

    bad = read_lines(job.output_path)[7]
    assert bad["response"]["status_code"] == 503
    assert bad["error"]["message"] == "the connection was lost"
    assert backend.requests[7] == AT_ONCE.attempts


async def test_a_line_that_is_always_refused_gets_the_last_error(job: BatchJob) -> None:
    full = json_answer(
        {"error": {"message": "the queue is full", "type": "rate_limit_error", "param": None, "code": 429}}, 429
    )
    backend = Scripted(lambda n, times: full if n == 7 else echo(n), probe=404)

    await run_job(job, backend)

    bad = read_lines(job.output_path)[7]
    assert (bad["response"]["status_code"], bad["error"]["message"]) == (429, "the queue is full")
    assert backend.requests[7] == AT_ONCE.busy_attempts


@pytest.mark.parametrize("probe", [503, 500, Unavailable("nobody")])
async def test_a_server_that_is_gone_ends_the_run_and_not_its_lines(job: BatchJob, probe: int | Exception) -> None:
    backend = Scripted(lambda n, times: echo(n) if n < 10 else Unavailable("no connection"), probe=probe)

    with pytest.raises(BatchStopped, match=r"no connection, and .* 10 of 30 lines are answered and kept in .*journal"):
        await run_job(job, backend)

    assert not job.output_path.exists()
    again = Scripted()
    assert (await run_job(job, again)).resumed == 10
    assert set(again.requests) == set(range(10, NUM_LINES))
