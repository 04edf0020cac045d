"""The folder of built libraries, `native` in the cache folder. Its files are executed, so only its owner may write."""

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_POLL_S = 0.02
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class NoNative(Exception):
    """Why there are no native functions; Python does the work.

    NoNative
      +- BuildFailed     the compiler rejects the sources, or the library does not work: a retry would fail too
      +- BuildStopped    the process that requested the build has exited
    """


class BuildFailed(NoNative):
    """The compiler rejects the sources, or the built library does not work."""


class BuildStopped(NoNative):
    """The build was cancelled."""


def library_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of built libraries: in $PDSERVE_CACHE_DIR, else in pdserve's folder in XDG's cache folder."""
    if environ.get("PDSERVE_CACHE_DIR"):
        return Path(environ["PDSERVE_CACHE_DIR"]).absolute() / "native"
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]).absolute() / "pdserve" / "native"
    home = environ.get("HOME") or os.path.expanduser("~")
    return Path(home).absolute() / ".cache" / "pdserve" / "native"


def exists_and_is_own(path: Path) -> bool:
    """Return whether `path` exists. Raises NoNative if another user owns it or may write to it."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise NoNative(f"{path}: {error.strerror}") from error
    if stat.S_ISLNK(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & _OTHERS_WRITE:
        raise NoNative(
            f"{path} belongs to user {found.st_uid}, mode {stat.filemode(found.st_mode)}: "
            f"it must belong to user {os.geteuid()}, not be a link, and be writable only by its owner"
        )
    return True


@contextmanager
def building(folder: Path, name: str, deadline: float) -> Iterator[None]:
    """Make the folder and hold the lock of library `name`, so that only one of many processes builds it.

    Raises NoNative, and OSError if the folder is not writable. `deadline` is a time of time.monotonic().
    """
    while (lock := try_lock(folder, name)) is None:
        if time.monotonic() > deadline:
            raise NoNative(f"another process has been building {name} in {folder} for too long")
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        os.close(lock)


def try_lock(folder: Path, name: str) -> int | None:
    """Make the folder and return a descriptor that holds the lock of library `name`; None if the lock is taken.

    The lock is released once the descriptor and all inherited copies are closed. Raises NoNative, OSError.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    exists_and_is_own(folder)
    lock = os.open(folder / f"{name}.lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


@contextmanager
def draft_folder(folder: Path, name: str) -> Iterator[Path]:
    """Make a temporary folder to build library `name` in, and remove it at the end. The caller holds the lock."""
    for left_over in folder.glob(f"draft-{name}-*"):  # left over from killed builds
        shutil.rmtree(left_over) if left_over.is_dir() else left_over.unlink()
    path = Path(tempfile.mkdtemp(prefix=f"draft-{name}-", dir=folder))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def replace_atomically(draft: Path, path: Path) -> None:
    """Rename a finished draft atomically: `path` is never incomplete, even after a power failure."""
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    draft.replace(path)
