"""The files that this process has open: their number shows nothing, as other tests leave some to the collector."""

import contextlib
import os

File = tuple[int, int]
"""A file's device and inode."""


def open_files() -> set[File]:
    """Return the files of all descriptors of this process, mapped ones included."""
    found = set[File]()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(
            FileNotFoundError
        ):  # the descriptor of the listing, or one that another thread has closed
            found.add(file_of(int(name)))
    return found


def file_of(descriptor: int) -> File:
    """Return the file of a descriptor."""
    found = os.stat(f"/proc/self/fd/{descriptor}")
    return found.st_dev, found.st_ino
