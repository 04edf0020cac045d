"""A foreign file in the place of the note is neither removed nor replaced by any run."""

from dataclasses import replace

import pytest

from batch.backend import Answer
from batch.job import BatchJob, BatchStopped
from batch.prepared_job import prepare
from batch.settings_note import note_of, remove_note, write_note
from tests.batch.scripted import NUM_LINES, Scripted, echo, json_answer, read_lines, run_job
from wire.errors import ConfigError

pytestmark = pytest.mark.anyio
MINE = b"what I asked of whom\n"


@pytest.mark.parametrize("content", [MINE, b"", b'00000000 {"pdserve_batch_journal":1}\n'])
@pytest.mark.parametrize("retry_failed", [False, True])
def test_a_foreign_file_is_refused_before_any_request(job: BatchJob, content: bytes, retry_failed: bool) -> None:
    job.note_path.write_bytes(content)

    with pytest.raises(ConfigError) as refused:
        prepare(replace(job, retry_failed=retry_failed))

    assert str(refused.value) == (
        f"{job.note_path} is not a pdserve note, or is damaged: remove it, or choose an output other than "
        f"{job.output_path}"
    )
    assert job.note_path.read_bytes() == content
    assert not job.journal_path.exists()


@pytest.mark.parametrize("status", [200, 400])
async def test_a_file_that_appeared_during_the_run_stays_too(job: BatchJob, status: int) -> None:
    def script(n: object, times: int) -> Answer:
        job.note_path.write_bytes(MINE)
        return json_answer({}, status)

    if status == 200:
        await run_job(job, Scripted(script))
    else:
        with pytest.raises(BatchStopped, match=r"out\.jsonl\.asked: it is not a pdserve note; 30 of 30 lines"):
            await run_job(job, Scripted(script))

    assert job.note_path.read_bytes() == MINE
    assert len(read_lines(job.output_path)) == NUM_LINES


async def test_a_note_of_ours_is_replaced_and_removed(job: BatchJob) -> None:
    write_note(job.note_path, {"--model": "a"})

    await run_job(replace(job, answer_settings={"--model": "b"}), Scripted(lambda n, times: json_answer({}, 400)))
    second = job.note_path.read_bytes()
    await run_job(replace(job, answer_settings={"--model": "b"}), Scripted(echo))

    assert b'"--model":"b"' in second
    assert not job.note_path.exists()
    remove_note(note_of(job.output_path))
