"""Become a user who may not read a file, for a while."""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def as_a_stranger(path: Path) -> Iterator[None]:
    """Lose the right to read one file, and nothing else: root becomes nobody, others close the file to themselves."""
    if os.geteuid() != 0:
        path.chmod(0)
        yield
        path.chmod(0o600)
        return
    path.chmod(0o600)
    # The stranger is still of root's group.
    through = stat.S_IXGRP | stat.S_IXOTH
    folders = [folder for folder in path.parents if folder.stat().st_mode & through != through]
    modes = [folder.stat().st_mode for folder in folders]
    for folder, mode in zip(folders, modes, strict=True):
        folder.chmod(mode | through)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
        for folder, mode in zip(folders, modes, strict=True):
            folder.chmod(mode)
