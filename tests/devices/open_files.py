"""Which files this process has open: how many there are says nothing where other tests leave some to a collection."""

import contextlib
import os

File = tuple[int, int]
"""Its device and inode."""


def open_files() -> set[File]:
    """Return all that a descriptor of this process is open for, those of its mappings among them."""
    found = set[File]()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own, or one that another thread has closed
            found.add(file_of(int(name)))
    return found


def file_of(descriptor: int) -> File:
    """Return what a descriptor is open for."""
    found = os.stat(f"/proc/self/fd/{descriptor}")
    return found.st_dev, found.st_ino
