"""A downloaded file, which appears at its path only when it is complete."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from wire.errors import ConfigError

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


class ReceivedFile:
    """Writes PATH.part, readable only by its owner. `keep` moves it to PATH; otherwise it is removed.

    Raises ConfigError, with the path and the system's message, for a write error.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._part = path.with_name(f"{path.name}.part")
        self._fd = -1

    def __enter__(self) -> Self:
        with self._translate_errors():
            self._fd = os.open(self._part, _FLAGS, 0o600)
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()
        with contextlib.suppress(OSError):
            self._part.unlink(missing_ok=True)

    def restart(self) -> None:
        """Truncate the file."""
        with self._translate_errors():
            os.ftruncate(self._fd, 0)
            os.lseek(self._fd, 0, os.SEEK_SET)

    def write(self, piece: bytes) -> None:
        """Append these bytes."""
        with self._translate_errors():
            view = memoryview(piece)
            while view:
                view = view[os.write(self._fd, view) :]

    def keep(self) -> None:
        """Move the file to its path, replacing an existing one."""
        self._close()
        with self._translate_errors():
            self._part.replace(self._path)

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with self._translate_errors():
                os.close(fd)

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(f"{self._part}: {error.strerror or error}") from error
