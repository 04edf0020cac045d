"""Become a user who may not read a file, or only the owner of one that is closed to all, for a while."""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_NOBODY = 65534


@contextlib.contextmanager
def as_a_stranger(path: Path) -> Iterator[None]:
    """Lose the right to read one file, and nothing else: root becomes nobody, others close the file to themselves."""
    if os.geteuid() != 0:
        path.chmod(0)
        yield
        path.chmod(0o600)
        return
    path.chmod(0o600)
    with _nobody(path):
        yield


@contextlib.contextmanager
def as_an_owner_who_may_not(path: Path) -> Iterator[None]:
    """Own a file of mode 0000: root, whom no mode keeps out, becomes nobody, and the file nobody's."""
    path.chmod(0)
    if os.geteuid() != 0:
        yield
    else:
        os.chown(path, _NOBODY, -1)
        with _nobody(path):
            yield


@contextlib.contextmanager
def _nobody(path: Path) -> Iterator[None]:
    # The stranger is still of root's group.
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
