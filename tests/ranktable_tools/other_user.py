"""Become, for a while, a user who may not read a file, or the owner of a file that is closed to everyone."""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_NOBODY = 65534


@contextlib.contextmanager
def as_another_user(path: Path) -> Iterator[None]:
    """Lose the right to read one file, and nothing else: root becomes nobody, others remove the file's mode bits."""
    if os.geteuid() != 0:
        path.chmod(0)
        yield
        path.chmod(0o600)
        return
    path.chmod(0o600)
    with _as_nobody(path):
        yield


@contextlib.contextmanager
def as_an_owner_without_access(path: Path) -> Iterator[None]:
    """Own a file of mode 0000: root, which ignores modes, becomes nobody, and the file nobody's."""
    path.chmod(0)
    if os.geteuid() != 0:
        yield
    else:
        os.chown(path, _NOBODY, -1)
        with _as_nobody(path):
            yield


@contextlib.contextmanager
def _as_nobody(path: Path) -> Iterator[None]:
    # This user is still in root's group.
    through = stat.S_IXGRP | stat.S_IXOTH
    folders = [folder for folder in path.parents if folder.stat().st_mode & through != through]
    modes = [folder.stat().st_mode for folder in folders]
    for folder, mode in zip(folders, modes, strict=True):
        folder.chmod(mode | through)
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        for folder, mode in zip(folders, modes, strict=True):
            folder.chmod(mode)
