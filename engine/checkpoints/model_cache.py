"""Model folders created once per machine, by the process that holds the lock; others wait and then use the folder.

make(staging folder) -> folder in it --renamed--> final path

If a process is killed, the kernel releases the lock, and the next process removes the staging folder left behind.
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
    """Return `path`, created by `make` if missing; `make` gets a staging folder and returns a child of it.

    Raises ConfigError when another process holds the lock for `timeout_s`. Errors of `make` pass through.
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
    """Hold `lock` for the block; the kernel releases it when the process ends, so no stale lock remains."""
    deadline = time.monotonic() + timeout_s
    with lock.open("w") as handle:
        told = False
        while not _try_lock(handle.fileno()):
            if time.monotonic() > deadline:
                raise ConfigError(f"another process has held {lock} for {timeout_s:.0f} s")
            if not told:
                progress(f"waiting for another process that is creating {name}")
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
    """Remove staging folders of killed processes. Called under the lock, so no running process has one."""
    for leftover in folder.iterdir():
        if leftover.name.startswith(prefix) and leftover.is_dir():
            shutil.rmtree(leftover)
