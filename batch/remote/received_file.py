"""A file that comes from afar: it stands at its path only when it is whole."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from wire.errors import ConfigError

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


class ReceivedFile:
    """Writes PATH.part, for its owner alone, and moves it to PATH by `keep`; without that nothing is left.

    Raises ConfigError with the path and the system's words where the disk refuses.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._part = path.with_name(f"{path.name}.part")
        self._fd = -1

    def __enter__(self) -> Self:
        with self._in_words():
            self._fd = os.open(self._part, _FLAGS, 0o600)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
        with contextlib.suppress(OSError):
            self._part.unlink(missing_ok=True)

    def restart(self) -> None:
        """Forget what was written."""
        with self._in_words():
            os.ftruncate(self._fd, 0)
            os.lseek(self._fd, 0, os.SEEK_SET)

    def write(self, piece: bytes) -> None:
        """Add these bytes."""
        with self._in_words():
            view = memoryview(piece)
            while view:
                view = view[os.write(self._fd, view) :]

    def keep(self) -> None:
        """Put the file at its path, in the place of what is there."""
        self._close()
        with self._in_words():
            self._part.replace(self._path)

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with self._in_words():
                os.close(fd)

    @contextlib.contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(f"{self._part}: {error.strerror or error}") from error
