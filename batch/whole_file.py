"""Write a file atomically: to a temporary name beside it, flushed to disk, then renamed."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from batch.journal import sync_folder
from wire.errors import ConfigError

_BUFFER_BYTES = 2**20
_MODE = 0o666  # minus the umask


class WholeFile:
    """Writes the new file for `path`; `with` removes the temporary one unless `publish` was called.

    The caller holds a lock on `path`: the temporary name is fixed, so that killed writers leave at most one file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = temporary_path(path)
        self._temporary.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._temporary, flags, _mode_of(path))
        self._file = os.fdopen(descriptor, "wb", buffering=_BUFFER_BYTES)

    def __enter__(self) -> Self:
        """Enter."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Remove the temporary file if it was not renamed."""
        with contextlib.suppress(OSError):  # a published file was flushed before, so no data is lost
            self._file.close()
        self._temporary.unlink(missing_ok=True)

    def write(self, content: bytes) -> None:
        """Append. Raises OSError."""
        with _add_path_to_errors(self._path):
            self._file.write(content)

    def flush(self) -> None:
        """Flush everything written so far to disk. Raises OSError."""
        with _add_path_to_errors(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())

    def publish(self) -> None:
        """Rename the flushed file to its path, replacing an existing one. Raises OSError."""
        if not os.path.samestat(self._temporary.lstat(), os.fstat(self._file.fileno())):
            raise OSError(errno.EBUSY, "another run is writing the same file", str(self._path))
        os.rename(self._temporary, self._path)
        sync_folder(self._path.parent)


def temporary_path(path: Path) -> Path:
    """Return the temporary name for the file at `path`."""
    return path.with_name(path.name + ".journal-part")


def check_place(path: Path, what: str) -> None:
    """Raise ConfigError if `path` cannot be replaced: a folder, a link, a device, or a file that is read-only."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{what} {path}: {error.strerror}") from error
    if stat.S_ISLNK(mode):
        raise ConfigError(f"{what} {path} is a symbolic link: name the file itself")
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{what} {path} is {'a folder' if stat.S_ISDIR(mode) else 'not a regular file'}: name a file")
    if not os.access(path, os.W_OK):
        raise ConfigError(f"{what} {path} is read-only")


def check_folder(path: Path, what: str) -> None:
    """Raise ConfigError if no file can be created beside `path`."""
    folder = path.parent
    if not folder.is_dir():
        raise ConfigError(f"{what} {path}: there is no folder {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{what} {path}: the folder {folder} is read-only")


@contextlib.contextmanager
def _add_path_to_errors(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError that has none, such as one from a descriptor."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _mode_of(path: Path) -> int:
    """Return the mode of the replaced file, so that the new one is not readable by more users."""
    try:
        return stat.S_IMODE(path.stat().st_mode) & _MODE
    except OSError:
        return _MODE
