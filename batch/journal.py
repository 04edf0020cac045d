"""The journal beside the output: every received answer, kept until the output is written."""

import contextlib
import fcntl
import os
import stat
import threading
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from batch.answer_settings import difference
from batch.journal_record import JournalRecord, decode, decode_header, encode, encode_header, is_cut_header
from processes.failpoints import failpoint
from wire.errors import ConfigError

_MODE = 0o600
_NOTHING = 2**64 - 1  # no record begins there


class Journal:
    """Answers by position, on disk. Owns the file and its lock, which only one run at a time can hold.

    In memory it keeps 12 bytes per request, and the positions of failed requests.
    """

    def __init__(self, path: Path, descriptor: int, num_requests: int) -> None:
        self.path = path
        self.num_done = self.num_failed = self.prompt_tokens = self.completion_tokens = 0
        self._descriptor = descriptor
        self._closing = threading.Lock()  # held while a thread uses the descriptor, and while it is closed
        self._is_open = True
        self._end = 0
        self._is_synced = True
        self.is_empty = True  # the file has no answers, not even dropped ones
        self._failed: set[int] = set()  # positions
        self._offsets = array("Q", [_NOTHING]) * num_requests
        self._lengths = array("I", [0]) * num_requests

    @classmethod
    def open(cls, path: Path, answer_settings: Mapping[str, Any], num_requests: int) -> Self:
        """Resume the journal of an earlier run with the same answer settings, or start one.

        Raises ConfigError if it cannot be written, if another run has locked it, or if its input or settings differ.
        """
        journal = cls(path, _locked(path), num_requests)
        try:
            if not journal._resume(answer_settings):
                journal._begin(answer_settings)
        except OSError as error:
            journal.close()
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
        except BaseException:
            journal.close()
            raise
        return journal

    def has(self, position: int) -> bool:
        """Whether the request at `position` has its answer."""
        return self._offsets[position] != _NOTHING

    def append(self, record: JournalRecord) -> None:
        """Write an answer; it survives a crash of this process and, once `sync` has returned, of the machine.

        Raises OSError, which leaves the journal unchanged.
        """
        failpoint("batch.before_write")
        content = encode(record)
        self._write(content)
        self._note(record, len(content))
        failpoint("batch.after_write")

    def sync(self) -> None:
        """Flush all appended answers to disk, from any thread. Raises OSError."""
        with self._closing:
            if self._is_open and not self._is_synced:
                self._is_synced = True  # an append during the flush resets it
                try:
                    os.fsync(self._descriptor)
                except OSError:
                    self._is_synced = False
                    raise

    def forget_failed(self) -> None:
        """Drop the answers of failed lines, so that these lines are sent again."""
        for position in self._failed:
            self._offsets[position] = _NOTHING
        self.num_done -= len(self._failed)
        self.num_failed -= len(self._failed)
        self._failed.clear()

    def line(self, position: int) -> tuple[bytes, bool]:
        """Return the output line of an answered request, and whether the request failed. Raises OSError."""
        with self._closing:
            content = os.pread(self._descriptor, self._lengths[position], self._offsets[position])
        record = decode(content)
        if record is None or record.position != position:
            raise OSError(0, f"the record at byte {self._offsets[position]} is not the one that was written")
        return record.outcome.line, record.outcome.failed

    def remove(self) -> None:
        """Remove the file (the output is written, or nothing was answered), unless another run has replaced it."""
        if _is_at(self.path, self._descriptor):
            self.path.unlink()

    def close(self) -> None:
        """Close the file and release the lock."""
        with self._closing:
            if self._is_open:
                self._is_open = False
                os.close(self._descriptor)

    def _resume(self, answer_settings: Mapping[str, Any]) -> bool:
        """Read an earlier run's records and truncate an incomplete one; return False if there is nothing to keep."""
        with os.fdopen(os.dup(self._descriptor), "rb") as file:
            header = file.readline()
            recorded = decode_header(header)
            if recorded is None and header and not is_cut_header(header):
                raise ConfigError(f"{self.path} is not a pdserve journal, or is damaged: remove it to start again")
            if recorded is None:
                return False
            self._end = len(header)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._end += len(line)
                record = decode(line)
                if record is not None:
                    self._count(record, len(line))
        changed = difference(recorded, answer_settings)
        if not self.is_empty and changed is not None:
            remedy = "finish that run with its own settings, or remove the file to start again"
            raise ConfigError(f"{self.path} has the answers of another run: {changed}; {remedy}")
        os.ftruncate(self._descriptor, self._end)
        return changed is None

    def _begin(self, answer_settings: Mapping[str, Any]) -> None:
        self._end = 0
        os.ftruncate(self._descriptor, 0)
        try:
            self._write(encode_header(answer_settings))
            os.fsync(self._descriptor)
            sync_folder(self.path.parent)
        except OSError:
            self.remove()
            raise
        self._is_synced = True

    def _write(self, content: bytes) -> None:
        left = memoryview(content)
        try:
            while left:
                left = left[os.pwrite(self._descriptor, left, self._end + len(content) - len(left)) :]
        except OSError:
            with contextlib.suppress(OSError):  # the next run truncates what remains
                os.ftruncate(self._descriptor, self._end)
            raise
        self._end += len(content)
        self._is_synced = False

    def _count(self, record: JournalRecord, length: int) -> None:
        """Count a record of an earlier run: the first for its position, or a good answer that replaces a failure.

        A record past the end of the input is from a longer input: `is_empty` is then false, and `_resume` refuses the
        journal because its recorded input differs.
        """
        self.is_empty = False
        if record.position >= len(self._offsets):
            return
        if record.position in self._failed and not record.outcome.failed:
            self._failed.remove(record.position)
            self.num_done -= 1
            self.num_failed -= 1
        elif self.has(record.position):
            return
        self._note(record, length)

    def _note(self, record: JournalRecord, length: int) -> None:
        """Count the last record of the file, which is `length` bytes long."""
        self.is_empty = False
        if record.outcome.failed:
            self._failed.add(record.position)
        self._offsets[record.position] = self._end - length
        self._lengths[record.position] = length
        self.num_done += 1
        self.num_failed += record.outcome.failed
        self.prompt_tokens += record.outcome.prompt_tokens
        self.completion_tokens += record.outcome.completion_tokens


def sync_folder(folder: Path) -> None:
    """Flush the entries of `folder` to disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _locked(path: Path) -> int:
    """Open the file, creating it if missing, and take its lock. Raises ConfigError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, _MODE)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ConfigError(f"{path} is not a regular file: remove it")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_at(path, descriptor):
            raise BlockingIOError
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(f"{path} belongs to another run, which is writing the same output") from None
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(f"{path} cannot be locked: {error.strerror}") from error
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether the file is still at `path`: a run that has just ended removes it."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except OSError:
        return False
