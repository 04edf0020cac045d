"""Whatever must fail before a model loads fails in prepare, and leaves nothing behind."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from batch.job import BatchJob, InputLimits
from batch.prepared_job import prepare
from batch.runner import run_batch
from batch.whole_file import temporary_path
from tests.batch.scripted import Scripted, ignore, line, write_lines
from wire.errors import ConfigError


@pytest.fixture
def job(tmp_path: Path) -> BatchJob:
    """A job of three lines."""
    return BatchJob(write_lines(tmp_path / "in.jsonl", map(line, range(3))), tmp_path / "out.jsonl")


def _refusal(job: BatchJob) -> str:
    before = sorted(os.listdir(job.input_path.parent))
    with pytest.raises(ConfigError) as refused:
        prepare(job)
    assert sorted(os.listdir(job.input_path.parent)) == before
    return str(refused.value)


def test_a_job_that_can_run_is_counted(job: BatchJob) -> None:
    with prepare(job) as prepared:
        assert (prepared.total, prepared.left) == (3, 3)
        assert job.journal_path.exists()


def test_preparing_alone_leaves_nothing(job: BatchJob) -> None:
    prepare(job).close()

    assert os.listdir(job.input_path.parent) == ["in.jsonl"]


def test_bad_lines_are_refused(job: BatchJob) -> None:
    job.input_path.write_text("{\n")

    assert "line 1 is the start of JSON over several lines" in _refusal(job)


def test_limits_are_the_jobs(job: BatchJob) -> None:
    assert "more lines than the limit, 2" in _refusal(replace(job, limits=InputLimits(max_lines=2)))


@pytest.mark.parametrize("name", ["in.jsonl", "./in.jsonl", "hard"])
def test_an_output_that_is_the_input_is_refused(job: BatchJob, name: str) -> None:
    os.link(job.input_path, job.input_path.with_name("hard"))
    content = job.input_path.read_bytes()

    assert "would overwrite the input" in _refusal(replace(job, output_path=job.input_path.parent / name))
    assert "would overwrite the input" in _refusal(replace(job, error_path=job.input_path.parent / name))
    assert job.input_path.read_bytes() == content


def test_an_input_named_through_a_link_is_the_input(job: BatchJob) -> None:
    link = job.input_path.with_name("link")
    link.symlink_to(job.input_path)

    assert "would overwrite the input" in _refusal(replace(job, input_path=link, output_path=job.input_path))


def test_an_input_where_the_run_keeps_its_own_files_is_refused(job: BatchJob) -> None:
    for place in (job.journal_path, temporary_path(job.output_path)):
        job.input_path.rename(place)
        assert "would overwrite the input" in _refusal(replace(job, input_path=place))
        place.rename(job.input_path)


def test_one_path_for_two_outputs_is_refused(job: BatchJob) -> None:
    for place in (job.output_path, job.journal_path, job.output_path.parent / "." / "out.jsonl"):
        assert "would be written twice" in _refusal(replace(job, error_path=place))


def test_an_output_in_a_missing_folder_is_refused(job: BatchJob) -> None:
    assert "there is no folder" in _refusal(replace(job, output_path=job.output_path / "deeper" / "out.jsonl"))


def test_an_output_that_is_a_link_is_refused(job: BatchJob) -> None:
    job.output_path.symlink_to("elsewhere")

    assert "is a symbolic link" in _refusal(job)


def test_a_second_run_of_one_output_is_refused(job: BatchJob) -> None:
    with prepare(job):
        assert "belongs to another run" in _refusal(job)
    prepare(job).close()


def test_a_name_that_is_too_long_for_the_journal_is_refused(job: BatchJob) -> None:
    assert "File name too long" in _refusal(replace(job, output_path=job.output_path.with_name("x" * 250)))


@pytest.mark.parametrize("name", ["", ".", "/", ".."])
def test_an_output_without_a_name_is_refused(job: BatchJob, name: str) -> None:
    with pytest.raises(ConfigError, match=r"the output .* is a folder"):
        prepare(replace(job, output_path=Path(name)))
    with pytest.raises(ConfigError, match=r"the error file .* is a folder"):
        prepare(replace(job, error_path=Path(name)))


@pytest.mark.parametrize("inflight", [0, -1])
def test_fewer_than_one_line_at_once_is_refused(job: BatchJob, inflight: int) -> None:
    with pytest.raises(ConfigError, match=f"--max-inflight is {inflight}, but must be at least 1"):
        replace(job, max_inflight=inflight)


@pytest.mark.anyio
async def test_a_stopped_run_resumes_only_with_its_input_and_settings(job: BatchJob) -> None:
    bound = replace(job, answer_settings={"model": "m"}, max_inflight=1)

    def stop(progress: object) -> None:
        if backend.requests:
            raise ZeroDivisionError

    backend = Scripted()
    with prepare(bound) as prepared, pytest.raises(ZeroDivisionError):
        await run_batch(prepared, backend, on_progress=stop)

    assert "model was m and is n now" in _refusal(replace(bound, answer_settings={"model": "n"}))
    content = bound.input_path.read_bytes()
    write_lines(bound.input_path, map(line, range(4)))
    assert "input was sha256 " in _refusal(bound)
    bound.input_path.write_bytes(content)
    with prepare(bound) as prepared:
        assert prepared.left == 2
        await run_batch(prepared, Scripted(), on_progress=ignore)
    assert len(bound.output_path.read_text().splitlines()) == 3
