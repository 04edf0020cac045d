"""Folders of models that are made once on this machine: by whoever holds the lock; others wait, then find it there.

make(staging folder) -> folder in it --renamed--> final path

A killed maker leaves a staging folder, which the next one removes; the system drops its lock.
"""

import fcntl
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from wire.errors import ConfigError

_LOCK_TIMEOUT_S = 1200.0
_POLL_S = 0.2


def make_once(
    path: Path, make: Callable[[Path], Path], progress: Callable[[str], None], *, timeout_s: float = _LOCK_TIMEOUT_S
) -> Path:
    """Return `path`, made by `make` where it is missing: in a staging folder it is given, whose child it returns.

    Raises ConfigError when another process holds the lock for `timeout_s`, and what `make` raises.
    """
    if path.is_dir():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{path.name}-"
    with _only_one(path.parent / f"{prefix}lock", path.name, progress, timeout_s):
        if not path.is_dir():
            _remove_leftovers(path.parent, prefix)
            with tempfile.TemporaryDirectory(prefix=prefix, dir=path.parent) as staging:
                make(Path(staging)).rename(path)
    return path


@contextmanager
def _only_one(lock: Path, name: str, progress: Callable[[str], None], timeout_s: float) -> Iterator[None]:
    """Hold `lock` for the block; the system drops it with the process, so a dead holder leaves nothing behind."""
    deadline = time.monotonic() + timeout_s
    with lock.open("w") as handle:
        told = False
        while not _try_lock(handle.fileno()):
            if time.monotonic() > deadline:
                raise ConfigError(f"another process has held {lock} for {timeout_s:.0f} s")
            if not told:
                progress(f"waiting for another process that is making {name}")
                told = True
            time.sleep(_POLL_S)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_leftovers(folder: Path, prefix: str) -> None:
    """Remove what a killed run left. Called under the lock: no living run has a staging folder."""
    for leftover in folder.iterdir():
        if leftover.name.startswith(prefix) and leftover.is_dir():
            shutil.rmtree(leftover)
