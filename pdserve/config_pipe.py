"""Buffer a `--config` that is a pipe, for a process that reads its flags more than once."""

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pdserve.flags.parser import take_config
from wire.errors import ConfigError

_OWN = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")


@contextmanager
def kept_config(argv: Sequence[str]) -> Iterator[list[str]]:
    """Yield the command line. If --config is a pipe, which can be read only once, a copy in memory takes its place.

    Raises ConfigError.
    """
    path, rest = take_config(argv)
    if path is None or not _is_pipe(path):
        yield list(argv)
        return
    descriptor = os.memfd_create("config")
    try:
        _copy(path, descriptor)
        yield [f"--config=/proc/self/fd/{descriptor}", *rest]
    finally:
        os.close(descriptor)


def _copy(path: str, descriptor: int) -> None:
    from pdserve.flags.config_file import MAX_BYTES

    try:
        with os.fdopen(descriptor, "wb", closefd=False) as copy, open(path, "rb") as pipe:
            copy.write(pipe.read(MAX_BYTES + 1))  # one byte above the limit, so that the parser refuses a larger file
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from error


def _is_pipe(path: str) -> bool:
    """Return whether `path` is a pipe inherited by this process; the parser reports a missing or foreign file."""
    try:
        return path.startswith(_OWN) and not stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False
