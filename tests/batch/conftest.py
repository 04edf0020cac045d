"""Coroutine tests marked `anyio` run on asyncio alone, and a job to run."""

from pathlib import Path

import pytest

from batch.job import BatchJob
from tests.batch.scripted import AT_ONCE, NUM_LINES, line, write_lines


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The one loop we run on."""
    return "asyncio"


@pytest.fixture
def job(tmp_path: Path) -> BatchJob:
    """A job over NUM_LINES lines whose `n` count up."""
    source = write_lines(tmp_path / "in.jsonl", map(line, range(NUM_LINES)))
    return BatchJob(source, tmp_path / "out.jsonl", tmp_path / "err.jsonl", max_inflight=4, retries=AT_ONCE)
