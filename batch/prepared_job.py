"""Prepare a job before any model is loaded: read the input, open the journal, check that the output can be written."""

import contextlib
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

from batch.earlier_answers import EarlierAnswers, answers_in_journal, answers_in_output
from batch.input_file import InputFile
from batch.job import BatchJob
from batch.journal import Journal
from batch.settings_note import check_note, check_place_of_note
from batch.whole_file import check_folder, check_place, temporary_path
from wire.errors import ConfigError


class PreparedJob:
    """A job to run once. Owns the input's descriptor and the journal with its lock; use it in a `with` statement."""

    def __init__(self, job: BatchJob, source: InputFile, journal: Journal) -> None:
        self.job = job
        self.source = source
        self.journal = journal
        self.earlier = EarlierAnswers(job.output_path)  # answers of an earlier run, with `retry_failed`

    @property
    def total(self) -> int:
        """How many lines the output will have."""
        return len(self.source)

    @property
    def left(self) -> int:
        """How many lines have no answer yet; if all have one, no backend is used."""
        return self.total - self.journal.num_done - len(self.earlier.wanted)

    def take_over(self) -> None:
        """Copy the answers of the earlier output into the journal, after all checks have passed.

        Raises OSError if they cannot be written, ConfigError if that output has changed.
        """
        for record in self.earlier.records():
            self.journal.append(record)
        self.earlier = replace(self.earlier, wanted={})

    def __enter__(self) -> Self:
        """Enter."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close the files and release the lock."""
        self.close()

    def close(self) -> None:
        """Close the files and release the lock; remove a journal without answers."""
        if self.journal.is_empty:
            with contextlib.suppress(OSError):
                self.journal.remove()
        self.journal.close()
        self.source.close()


def prepare(job: BatchJob) -> PreparedJob:
    """Read the whole input and open the journal, which may have answers of a stopped run.

    Raises ConfigError for all that can be checked before a line is sent: unusable lines, an output that cannot be
    written or that another run is writing, a journal with answers to another input or from another model, and, for a
    retry of failed lines, an output that is missing, or that is from another input or other settings.
    """
    _check_places(job)
    source = InputFile.open(job.input_path, job.limits)
    try:
        for path, what in _written_paths(job):
            if source.is_at(path) or source.is_at(temporary_path(path)):
                raise ConfigError(f"{what} {path} would overwrite the input: choose another path")
        answer_settings = {"input": f"sha256 {source.digest}", **job.answer_settings}
        prepared = PreparedJob(job, source, Journal.open(job.journal_path, answer_settings, len(source)))
    except BaseException:
        source.close()
        raise
    if job.retry_failed:
        try:
            prepared.journal.forget_failed()
            prepared.earlier = _earlier_answers(job, source, prepared.journal)
        except BaseException:
            prepared.close()
            raise
    return prepared


def _earlier_answers(job: BatchJob, source: InputFile, journal: Journal) -> EarlierAnswers:
    """Return the answers to keep. If the output has no note but the journal has answers, only the journal is used.

    The journal may be from a later run with other settings. If it is from a stopped retry, the good answers of the
    output were copied into it before that retry sent any line.
    """
    if not journal.is_empty and not job.note_path.exists():
        return answers_in_journal(source, journal)
    stopped = None if journal.is_empty else job.journal_path
    check = partial(check_note, job.note_path, job.answer_settings, job.output_path, stopped)
    return answers_in_output(job.output_path, source, journal, check)


def _check_places(job: BatchJob) -> None:
    written = _written_paths(job)
    for path, what in written:
        check_folder(path, what)
        check_place(path, what)
    check_place_of_note(job.note_path, job.output_path)
    places = [os.path.realpath(path) for path, _ in written]
    for (path, what), place in zip(written, places, strict=True):
        if places.count(place) > 1:
            raise ConfigError(f"{what} {path} would be written twice: choose another path")


def _written_paths(job: BatchJob) -> list[tuple[Path, str]]:
    """Return the paths that a run writes, with their names."""
    named = [(job.output_path, "the output"), (job.journal_path, "the journal"), (job.note_path, "the note")]
    return named if job.error_path is None else [*named, (job.error_path, "the error file")]
