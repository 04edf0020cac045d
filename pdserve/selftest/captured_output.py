"""Capture what libraries print while checks run: it is kept out of the table; its end is in the report."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

_TAIL_BYTES = 4_096


@contextlib.contextmanager
def stderr_into(log: Path) -> Iterator[None]:
    """Redirect file descriptor 2 of this process to append to `log`."""
    sys.stderr.flush()
    before = os.dup(2)
    try:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(before, 2)
        os.close(before)


def tail(log: Path) -> list[str]:
    """Return the last non-empty lines, none if the file does not exist."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line.strip() for line in text.split("\n") if line.strip()]
