"""The journal beside the output: every answer that came, kept until the output stands."""

import contextlib
import fcntl
import os
import stat
import threading
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from batch.binding import difference
from batch.journal_record import JournalRecord, decode, decode_header, encode, encode_header, is_cut_header
from wire.errors import ConfigError
from wire.failpoints import failpoint

_MODE = 0o600
_NOTHING = 2**64 - 1  # no record begins there


class Journal:
    """Answers by position, on disk. Owns the file and its lock: one run at a time has it.

    In memory it keeps 12 bytes a request, and the positions of those that failed.
    """

    def __init__(self, path: Path, descriptor: int, num_requests: int) -> None:
        self.path = path
        self.num_done = self.num_failed = self.prompt_tokens = self.completion_tokens = 0
        self._descriptor = descriptor
        self._closing = threading.Lock()  # held where the descriptor is used by a thread, and where it is closed
        self._is_open = True
        self._end = 0
        self._is_synced = True
        self.is_empty = True  # no answer stands in the file, not even a forgotten one
        self._failed: set[int] = set()  # positions
        self._offsets = array("Q", [_NOTHING]) * num_requests
        self._lengths = array("I", [0]) * num_requests

    @classmethod
    def open(cls, path: Path, binding: Mapping[str, Any], num_requests: int) -> Self:
        """Take up the journal of an earlier run with the same `binding`, or begin one.

        Raises ConfigError where it cannot be written, another run has it, or it is of another input or binding.
        """
        journal = cls(path, _locked(path), num_requests)
        try:
            if not journal._take_up(binding):
                journal._begin(binding)
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
        """Keep an answer; after a crash of this process it is there, after one of the machine once `sync` returned.

        Raises OSError, and then the journal is as it was before.
        """
        failpoint("batch.before_write")
        content = encode(record)
        self._write(content)
        self._note(record, len(content))
        failpoint("batch.after_write")

    def sync(self) -> None:
        """Have the disk keep all that was appended, from any thread. Raises OSError."""
        with self._closing:
            if self._is_open and not self._is_synced:
                self._is_synced = True  # what is appended meanwhile says otherwise again
                try:
                    os.fsync(self._descriptor)
                except OSError:
                    self._is_synced = False
                    raise

    def forget_failed(self) -> None:
        """Have no answer to the lines that failed: they are to be asked again, and what comes then counts."""
        for position in self._failed:
            self._offsets[position] = _NOTHING
        self.num_done -= len(self._failed)
        self.num_failed -= len(self._failed)
        self._failed.clear()

    def line(self, position: int) -> tuple[bytes, bool]:
        """Return the output's line of a request that has its answer, and whether it failed. Raises OSError."""
        with self._closing:
            content = os.pread(self._descriptor, self._lengths[position], self._offsets[position])
        record = decode(content)
        if record is None or record.position != position:
            raise OSError(0, f"the record at byte {self._offsets[position]} is not what was written")
        return record.outcome.line, record.outcome.failed

    def remove(self) -> None:
        """Remove the file, unless it is another run's by now: the output stands, or nothing was answered."""
        if _is_at(self.path, self._descriptor):
            self.path.unlink()

    def close(self) -> None:
        """Close the file and leave the lock."""
        with self._closing:
            if self._is_open:
                self._is_open = False
                os.close(self._descriptor)

    def _take_up(self, binding: Mapping[str, Any]) -> bool:
        """Read an earlier run's records and cut what it had not written whole; False where there is nothing to keep."""
        with os.fdopen(os.dup(self._descriptor), "rb") as file:
            header = file.readline()
            told = decode_header(header)
            if told is None and header and not is_cut_header(header):
                raise ConfigError(f"{self.path} is no journal of ours, or is damaged: remove it to begin anew")
            if told is None:
                return False
            self._end = len(header)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._end += len(line)
                record = decode(line)
                if record is not None:
                    self._take(record, len(line))
        parted = difference(told, binding)
        if not self.is_empty and parted is not None:
            words = "finish that run as it was begun, or remove the file to begin anew"
            raise ConfigError(f"{self.path} has the answers of another run: {parted}; {words}")
        os.ftruncate(self._descriptor, self._end)
        return parted is None

    def _begin(self, binding: Mapping[str, Any]) -> None:
        self._end = 0
        os.ftruncate(self._descriptor, 0)
        try:
            self._write(encode_header(binding))
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
            with contextlib.suppress(OSError):  # what stays is cut by who takes it up
                os.ftruncate(self._descriptor, self._end)
            raise
        self._end += len(content)
        self._is_synced = False

    def _take(self, record: JournalRecord, length: int) -> None:
        """Count a record of an earlier run, once for a position: the first, but a good answer instead of a failure.

        One past the end of the input is of a longer input: it is an answer all the same, and `_take_up` refuses it.
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
        """Count the record whose `length` bytes the file ends with."""
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
    """Have the disk keep the names in `folder`. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _locked(path: Path) -> int:
    """Open the file, which is made where there is none, and take its lock. Raises ConfigError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, _MODE)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ConfigError(f"{path} is no file: remove it")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_at(path, descriptor):
            raise BlockingIOError
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(f"{path} is another run's, which writes the same output now") from None
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(f"{path} cannot be locked: {error.strerror}") from error
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether the file is still there: a run that ended a moment ago has removed it."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except OSError:
        return False
