"""After a run only failed lines are sent again; the good answers stay as they are."""

import json
from dataclasses import replace
from typing import Any

import pytest

from batch.backend import Answer
from batch.job import BatchJob
from batch.prepared_job import prepare
from batch.runner import run_batch
from tests.batch.scripted import NUM_LINES, Scripted, echo, ignore, json_answer, line, read_lines, run_job, write_lines
from wire.errors import ConfigError

pytestmark = pytest.mark.anyio


def _every_tenth_fails(n: Any, times: int) -> Answer:
    return json_answer({"error": {"message": "no"}}, 400) if n % 10 == 3 else echo(n)


@pytest.fixture
async def ended(job: BatchJob) -> BatchJob:
    """A job that has ended with three failed lines, set to retry them."""
    await run_job(job, Scripted(_every_tenth_fails))
    return replace(job, retry_failed=True)


def _refusal(job: BatchJob) -> str:
    before = {path: path.read_bytes() for path in job.output_path.parent.iterdir()}
    with pytest.raises(ConfigError) as refused:
        prepare(job)
    assert {path: path.read_bytes() for path in job.output_path.parent.iterdir()} == before
    return str(refused.value)


async def test_only_failed_lines_are_retried_and_the_rest_stays_as_it_is(ended: BatchJob) -> None:
    before = ended.output_path.read_bytes().splitlines()
    backend = Scripted()

    progress = await run_job(ended, backend)

    after = ended.output_path.read_bytes().splitlines()
    assert set(backend.requests) == {3, 13, 23}
    assert [n for n in range(NUM_LINES) if before[n] != after[n]] == [3, 13, 23]
    assert [one["response"]["body"]["echo"] for one in read_lines(ended.output_path)] == list(range(NUM_LINES))
    assert (progress.done, progress.errors, progress.resumed) == (NUM_LINES, 0, NUM_LINES - 3)
    assert (progress.prompt_tokens, progress.completion_tokens) == (3 * NUM_LINES, 2 * NUM_LINES)
    assert ended.error_path is not None
    assert ended.error_path.read_bytes() == b""
    assert not ended.journal_path.exists()


async def test_a_line_that_fails_again_is_in_both_files_and_retryable(ended: BatchJob) -> None:
    await run_job(
        ended, Scripted(lambda n, times: json_answer({"error": {"message": "still"}}, 400) if n == 13 else echo(n))
    )

    assert ended.error_path is not None
    assert [one["error"]["message"] for one in read_lines(ended.error_path)] == ["still"]
    third = Scripted()
    await run_job(ended, third)
    assert set(third.requests) == {13}


async def test_without_failed_lines_no_request_is_sent(job: BatchJob) -> None:
    await run_job(job, Scripted())
    before = job.output_path.read_bytes()

    with prepare(replace(job, retry_failed=True)) as prepared:
        assert prepared.left == 0
    assert job.output_path.read_bytes() == before


async def test_an_unordered_output_without_its_last_newline_is_read(ended: BatchJob) -> None:
    lines = ended.output_path.read_bytes().splitlines(keepends=True)
    ended.output_path.write_bytes(b"".join(reversed(lines[:20])))
    backend = Scripted()

    await run_job(replace(ended, error_path=None), backend)

    assert set(backend.requests) == {3, 13, *range(20, NUM_LINES)}
    assert [one["custom_id"] for one in read_lines(ended.output_path)] == [f"request-{n}" for n in range(NUM_LINES)]


async def test_a_retry_that_was_stopped_continues(ended: BatchJob) -> None:
    with pytest.raises(RuntimeError, match="killed"):
        await run_job(ended, Scripted(lambda n, times: RuntimeError("killed") if n == 23 else echo(n)))
    assert ended.journal_path.exists()
    again = Scripted()

    await run_job(ended, again)

    assert 23 in again.requests
    assert set(again.requests) <= {3, 13, 23}
    assert [one["error"] for one in read_lines(ended.output_path)] == [None] * NUM_LINES


def test_without_an_output_there_is_nothing_to_retry(job: BatchJob) -> None:
    assert _refusal(replace(job, retry_failed=True)) == (
        f"{job.output_path} does not exist, so there are no failed lines to retry: "
        "run the batch without --retry-failed first"
    )


async def test_an_output_of_another_input_is_refused(ended: BatchJob) -> None:
    write_lines(ended.input_path, [line(n) for n in range(20)])

    assert _refusal(ended) == (
        f"{ended.output_path}: line 21 answers 'request-20', which is not in the input: this output belongs "
        "to another input"
    )


async def test_a_truncated_line_is_named(ended: BatchJob) -> None:
    ended.output_path.write_bytes(ended.output_path.read_bytes()[:-20])

    assert f"{ended.output_path}: line 30 is not JSON" in _refusal(ended)


@pytest.mark.parametrize(
    "answered",
    [
        {"response": None, "error": {"message": "x"}}, {"response": {"status_code": 500, "body": {}}, "error": None},
        {"response": None, "error": None}, {"response": {"body": {}}, "error": None},
    ],
)  # fmt: skip
async def test_other_runners_failures_are_recognised(job: BatchJob, answered: dict[str, Any]) -> None:
    write_lines(job.input_path, [line(0)])
    job.output_path.write_text(json.dumps({"id": "vllm-1", "custom_id": "request-0", **answered}) + "\n")
    backend = Scripted()

    await run_job(replace(job, retry_failed=True), backend)

    assert set(backend.requests) == {0}


# A retry must use the settings of the earlier run


async def test_failed_lines_are_not_retried_on_another_model(job: BatchJob) -> None:
    await run_job(replace(job, answer_settings={"--model": "a", "--dtype": "float32"}), Scripted(_every_tenth_fails))
    again = replace(job, retry_failed=True)

    for answer_settings, words in (
        ({"--model": "b", "--dtype": "float32"}, "--model was a and is b now"),
        ({"--model": "a", "--dtype": "float32", "--generation-config": "auto"}, "--generation-config was (none) and"),
        ({"--model": "a"}, "--dtype was float32 and is (none) now"),
    ):
        refusal = _refusal(replace(again, answer_settings=answer_settings))
        assert refusal.startswith(f"{job.output_path} has the answers of another run: {words}")
        assert refusal.endswith(f"or remove {job.note_path} to mix both runs' answers")
    progress = await run_job(replace(again, answer_settings={"--model": "a", "--dtype": "float32"}), Scripted())

    assert (progress.done, progress.errors) == (NUM_LINES, 0)
    assert not job.note_path.exists(), "nothing is left to be sent again"


async def test_removing_the_note_mixes_both_runs_in_one_file(job: BatchJob) -> None:
    await run_job(replace(job, answer_settings={"--model": "a"}), Scripted(_every_tenth_fails))
    job.note_path.unlink()

    progress = await run_job(replace(job, answer_settings={"--model": "b"}, retry_failed=True), Scripted())

    assert (progress.done, progress.errors) == (NUM_LINES, 0)


async def test_an_output_without_a_good_answer_binds_no_model(job: BatchJob) -> None:
    await run_job(
        replace(job, answer_settings={"--model": "a"}), Scripted(lambda n, times: json_answer({"error": {}}, 404))
    )

    progress = await run_job(replace(job, answer_settings={"--model": "b"}, retry_failed=True), Scripted())

    assert (progress.done, progress.errors) == (NUM_LINES, 0)


async def test_failures_of_a_stopped_retry_are_retried(ended: BatchJob) -> None:
    def script(n: Any, times: int) -> Answer | Exception:
        return RuntimeError("killed") if n == 23 else json_answer({"error": {"message": "still"}}, 400)

    with pytest.raises(RuntimeError, match="killed"):
        await run_job(replace(ended, max_inflight=1), Scripted(script))
    again = Scripted()

    progress = await run_job(ended, again)

    assert set(again.requests) == {3, 13, 23}
    assert (progress.done, progress.errors) == (NUM_LINES, 0)
    assert [one["error"] for one in read_lines(ended.output_path)] == [None] * NUM_LINES


async def test_a_stopped_run_continues_and_retries_failed_lines(job: BatchJob) -> None:
    def script(n: Any, times: int) -> Answer | Exception:
        return RuntimeError("killed") if n == 4 else _every_tenth_fails(n, times)

    with pytest.raises(RuntimeError, match="killed"):
        await run_job(replace(job, max_inflight=1), Scripted(script))
    again = Scripted()

    await run_job(replace(job, retry_failed=True), again)

    assert set(again.requests) == set(range(3, NUM_LINES)), "without an output: the journal has what the run answered"
    assert [one["error"] for one in read_lines(job.output_path)] == [None] * NUM_LINES


async def test_a_stopped_retry_of_all_failures_loses_no_output(job: BatchJob) -> None:
    write_lines(job.input_path, [line(3), line(13)])

    def script(n: Any, times: int) -> Answer | Exception:
        return RuntimeError("killed") if n == 13 else json_answer({"error": {"message": "no"}}, 400)

    with pytest.raises(RuntimeError, match="killed"):
        await run_job(replace(job, max_inflight=1), Scripted(script))
    again = Scripted()

    await run_job(replace(job, retry_failed=True), again)

    assert set(again.requests) == {3, 13}


async def test_the_models_of_discarded_answers_are_reported(job: BatchJob) -> None:
    write_lines(job.input_path, [line(0, body={"n": 0}), line(1, body={"n": 1, "model": "m"}), line(2)])
    answers = [(0, "served"), (1, "m-2024")]
    write_lines(
        job.output_path,
        [
            {"custom_id": f"request-{n}", "response": {"status_code": 200, "body": {"model": name}}, "error": None}
            for n, name in answers
        ],
    )

    with prepare(replace(job, retry_failed=True)) as prepared:
        assert (prepared.left, prepared.earlier.models) == (1, frozenset({"served"}))


async def test_a_retry_that_fails_in_preparation_leaves_no_journal(ended: BatchJob) -> None:
    before = {path: path.read_bytes() for path in ended.output_path.parent.iterdir()}

    with prepare(ended) as prepared:
        assert (prepared.left, prepared.journal.num_done) == (3, 0)

    assert {path: path.read_bytes() for path in ended.output_path.parent.iterdir()} == before


async def test_an_output_that_lost_answers_since_it_was_read_is_refused(ended: BatchJob) -> None:
    with prepare(ended) as prepared:
        ended.output_path.write_bytes(b"")
        with pytest.raises(ConfigError, match=r"out\.jsonl has changed since it was read; answers missing: 27"):
            await run_batch(prepared, Scripted(), on_progress=ignore)
