"""The folder of built libraries: `native` in pdserve's cache folder, ours alone, since what lies in it is executed."""

import fcntl
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_POLL_S = 0.02
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class NoNative(Exception):
    """Why there are no native functions; Python does the work."""


def library_folder(environ: Mapping[str, str]) -> Path:
    """Return where built libraries lie: in $PDSERVE_CACHE_DIR, else in pdserve's folder of XDG's cache folder."""
    if environ.get("PDSERVE_CACHE_DIR"):
        return Path(environ["PDSERVE_CACHE_DIR"]).absolute() / "native"
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]).absolute() / "pdserve" / "native"
    home = environ.get("HOME") or os.path.expanduser("~")
    return Path(home).absolute() / ".cache" / "pdserve" / "native"


def is_ours(path: Path) -> bool:
    """Tell whether `path` is there. Raises NoNative where others may write it, or own it."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise NoNative(f"{path}: {error.strerror}") from error
    if stat.S_ISLNK(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & _OTHERS_WRITE:
        raise NoNative(
            f"{path} belongs to user {found.st_uid}, mode {stat.filemode(found.st_mode)}: "
            f"it must belong to user {os.geteuid()}, be no link, and nobody else may write it"
        )
    return True


@contextmanager
def building(folder: Path, name: str, deadline: float) -> Iterator[None]:
    """Make the folder and hold the lock of library `name`, so that of many processes one builds it.

    Raises NoNative, and OSError where nothing can be written. `deadline` is of time.monotonic().
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    is_ours(folder)
    with (folder / f"{name}.lock").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise NoNative(f"another process builds {name} in {folder} for too long") from None
                time.sleep(_POLL_S)
        yield


def replace_whole(draft: Path, path: Path) -> None:
    """Give a finished draft its name: whoever opens `path` finds all of it, also after a power cut."""
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    draft.replace(path)
