"""Whatever is answered and whenever a run is stopped, in the end each line has one answer, in its place."""

import asyncio
import contextlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch.backend import Answer
from batch.job import BatchJob
from batch.prepared_job import prepare
from batch.runner import BatchProgress, run_batch
from tests.batch.scripted import AT_ONCE, Scripted, echo, ignore, json_answer, line, read_lines, write_lines
from tests.examples import examples
from wire.errors import Unavailable

STATUSES = st.sampled_from([200, 200, 200, 201, 400, 404, 408, 429, 500, 502, 503, 504, 0])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where many examples run, one after the other."""
    return tmp_path_factory.mktemp("examples")


@examples(25)
@given(st.lists(st.tuples(STATUSES, st.integers(1, 4), st.booleans()), max_size=12), st.integers(1, 5), st.data())
def test_l4_every_line_is_answered_once_in_order(
    place: Path, plan: list[tuple[int, int, bool]], inflight: int, data: st.DataObject
) -> None:  # fmt: skip
    """`plan` has for each line the status (0: no answer) of its first attempts, how many, and whether it is valid."""
    lines = [line(n) if can_be_asked else line(n, url="/nowhere") for n, (_, _, can_be_asked) in enumerate(plan)]
    job = BatchJob(
        write_lines(place / "in", lines), place / "out", place / "err", max_inflight=inflight, retries=AT_ONCE
    )
    stops_at = data.draw(st.none() | st.integers(0, len(plan)))

    def script(n: int, times: int) -> Answer | Exception:
        status, tries, _ = plan[n]
        bad: Answer | Exception = json_answer({"error": {"message": "m"}}, status) if status else Unavailable("lost")
        return bad if times <= tries and status not in (200, 201) else echo(n)

    def stop(progress: BatchProgress) -> None:
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
    note = [] if all(one["error"] is None for one in found) else ["out.asked"]
    assert sorted(os.listdir(place)) == ["err", "in", "out", *note]
