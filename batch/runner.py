"""Run a prepared job: send the lines without an answer, keep each answer, then write the output."""

import asyncio
import contextlib
import random
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from batch.backend import BatchBackend
from batch.inflight import Inflight
from batch.job import BatchStopped
from batch.journal import Journal
from batch.journal_record import JournalRecord
from batch.line_attempts import LineAttempts
from batch.prepared_job import PreparedJob
from batch.results import write_results
from telemetry.capped_logs import CappedLog
from telemetry.logs import EventLogger

_SYNC_EVERY_S = 1.0
_MAX_WARNINGS = 20
_log = EventLogger("batch")


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """The progress of a run. `done` includes errors and an earlier run's answers, as do the token counts.

    `first_error` is the custom_id and the error of the first line that failed in this run, empty if none did.
    `warnings` has the first 20 different warnings in this run, each with the number of lines that got it.
    `at_once` is the number of lines in flight that a busy server allows, None if it is `max_inflight`.
    """

    total: int
    done: int
    errors: int
    resumed: int
    prompt_tokens: int
    completion_tokens: int
    first_error: str = ""
    warnings: Mapping[str, int] = field(default_factory=dict, compare=False)
    at_once: int | None = field(default=None, compare=False)


async def run_batch(
    prepared: PreparedJob, backend: BatchBackend, *, on_progress: Callable[[BatchProgress], None]
) -> BatchProgress:  # fmt: skip
    """Answer every line and write the output; return the final progress, with `done` equal to `total`.

    `on_progress` is called at the start and after each line. Raises BatchStopped, or CancelledError if the caller
    cancels: then no line is in flight any more, all answers are kept, and the same job resumes from there.
    """
    with _with_progress(prepared), _stop_on_write_error(prepared.journal):
        prepared.take_over()
    run = _Run(prepared, backend, on_progress)
    try:
        with _with_progress(prepared):
            await run.answer_all()
    finally:
        with contextlib.suppress(OSError):  # best effort
            prepared.journal.sync()
    with _with_progress(prepared):
        try:
            await _write(prepared)
        except OSError as error:
            raise _stop_of(prepared.journal, error) from error
    return run.progress()


class _Run:
    """One run's lines in flight and their counts."""

    def __init__(
        self, prepared: PreparedJob, backend: BatchBackend, on_progress: Callable[[BatchProgress], None]
    ) -> None:
        rng = random.Random(secrets.randbits(64))  # noqa: S311 - jitter, not a secret
        self._inflight = Inflight(prepared.job.max_inflight)
        self._attempts = LineAttempts(backend, prepared.job.retries, self._inflight, rng, CappedLog(_log))
        self._prepared = prepared
        self._on_progress = on_progress
        self._resumed = prepared.journal.num_done
        self._first_error = ""
        self._warnings: Counter[str] = Counter()

    def progress(self) -> BatchProgress:
        """Return the current progress."""
        journal, total = self._prepared.journal, self._prepared.total
        counts = journal.num_failed, self._resumed, journal.prompt_tokens, journal.completion_tokens
        limit = self._inflight.limit
        at_once = limit if limit < self._prepared.job.max_inflight else None
        return BatchProgress(
            total, journal.num_done, *counts, first_error=self._first_error, warnings=self._warnings, at_once=at_once
        )

    async def answer_all(self) -> None:
        """Send every line that has no answer, `max_inflight` at once. Raises BatchStopped, or `on_progress`'s error."""
        self._on_progress(self.progress())
        positions = (i for i in range(self._prepared.total) if not self._prepared.journal.has(i))
        try:
            async with asyncio.TaskGroup() as keeping:
                syncing = keeping.create_task(self._keep_synced())
                async with asyncio.TaskGroup() as sending:
                    for _ in range(min(self._prepared.job.max_inflight, self._prepared.left)):
                        sending.create_task(self._send_lines(positions))
                syncing.cancel()
        except ExceptionGroup as group:
            raise _first(group) from None

    async def _send_lines(self, positions: Iterator[int]) -> None:
        """Send one line after another; all tasks share `positions`."""
        for position in positions:
            outcome = await self._attempts.send(self._prepared.source.line(position))
            with _stop_on_write_error(self._prepared.journal):
                self._prepared.journal.append(JournalRecord(position, outcome))
            self._first_error = self._first_error or outcome.message
            for warning in outcome.warnings:
                if warning in self._warnings or len(self._warnings) < _MAX_WARNINGS:
                    self._warnings[warning] += 1
            self._on_progress(self.progress())

    async def _keep_synced(self) -> None:
        while True:
            await asyncio.sleep(_SYNC_EVERY_S)
            with _stop_on_write_error(self._prepared.journal):
                await asyncio.to_thread(self._prepared.journal.sync)


async def _write(prepared: PreparedJob) -> None:
    """Write the output in a thread, so that the loop is not blocked; once it is written, a cancellation is ignored."""
    cancelled = threading.Event()
    writing = asyncio.ensure_future(asyncio.to_thread(write_results, prepared, cancelled))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        cancelled.set()
        await asyncio.wait((writing,))
        task = asyncio.current_task()
        if not writing.result() or task is None:
            raise
        task.uncancel()


@contextlib.contextmanager
def _with_progress(prepared: PreparedJob) -> Iterator[None]:
    """If an error ends the run early, add to its message how many lines are done and how to resume."""
    try:
        yield
    except BatchStopped as error:
        done = f"{prepared.journal.num_done} of {prepared.total} lines are answered and kept in {prepared.journal.path}"
        raise BatchStopped(f"{error}; {done}: the same command resumes from there") from error


@contextlib.contextmanager
def _stop_on_write_error(journal: Journal) -> Iterator[None]:
    """Stop the run if an answer cannot be written to disk."""
    try:
        yield
    except OSError as error:
        raise _stop_of(journal, error) from error


def _stop_of(journal: Journal, error: OSError) -> BatchStopped:
    return BatchStopped(f"{error.filename or journal.path}: {error.strerror}")


def _first(group: ExceptionGroup[Exception]) -> Exception:
    """Return the first error of the group."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, ExceptionGroup) else error
