"""A run stopped before it replaced an earlier output continues with its own answers: the two are never mixed."""

from dataclasses import replace

import pytest

from batch.job import BatchJob
from batch.prepared_job import prepare
from tests.batch.scripted import Script, Scripted, json_answer, line, read_lines, run_job, write_lines
from wire.errors import ConfigError

pytestmark = pytest.mark.anyio


def _answers_in_dtype(dtype: str) -> Script:
    return lambda n, times: json_answer({"dtype": dtype, "model": dtype})


async def _stopped(job: BatchJob, dtype: str, script: Script) -> BatchJob:
    """Run four lines to their end in float32, then again in `dtype`, stopped at the third; return that job."""
    write_lines(job.input_path, [line(n, body={"n": n}) for n in range(4)])
    await run_job(replace(job, answer_settings={"--dtype": "float32"}), Scripted(script))
    again = replace(job, answer_settings={"--dtype": dtype}, max_inflight=1)
    with pytest.raises(RuntimeError, match="killed"):
        await run_job(
            again, Scripted(lambda n, times: RuntimeError("killed") if n == 2 else _answers_in_dtype(dtype)(n, times))
        )
    return replace(again, retry_failed=True)


async def test_a_stopped_run_takes_nothing_from_the_output_it_replaces(job: BatchJob) -> None:
    retry = await _stopped(job, "bfloat16", _answers_in_dtype("float32"))
    backend = Scripted(_answers_in_dtype("bfloat16"))

    with prepare(retry) as prepared:
        assert (prepared.left, prepared.earlier.models) == (2, frozenset({"bfloat16"})), (
            "the journal's, not the output's"
        )
    progress = await run_job(retry, backend)

    assert [one["response"]["body"]["dtype"] for one in read_lines(job.output_path)] == ["bfloat16"] * 4
    assert set(backend.requests) == {2, 3}
    assert (progress.done, progress.resumed) == (4, 2)


async def test_a_stopped_run_over_an_output_of_other_settings_ends_first(job: BatchJob) -> None:
    retry = await _stopped(
        job, "bfloat16", lambda n, times: json_answer({}, 400) if n == 1 else _answers_in_dtype("float32")(n, times)
    )

    with pytest.raises(ConfigError) as refused:
        prepare(retry)
    assert str(refused.value) == (
        f"{job.output_path} has the answers of another run: --dtype was float32 and is bfloat16 now; "
        f"{job.journal_path} holds the answers of a later run that was stopped: finish that run first, without "
        "--retry-failed"
    )
    await run_job(replace(retry, retry_failed=False), Scripted(_answers_in_dtype("bfloat16")))
    assert [one["response"]["body"]["dtype"] for one in read_lines(job.output_path)] == ["bfloat16"] * 4
