"""The owner and mode of a file, for the error text of one that cannot be read."""

import os
import stat
from pathlib import Path


def whose(path: Path) -> str:
    """Describe a file's owner and this process's user; if they are the same, the file's mode instead."""
    own_mode = mode_of_own(path)
    if own_mode is not None:
        return f"it belongs to uid {os.geteuid()}, this process's user, and has mode {own_mode:04o}"
    try:
        owner = f"it belongs to uid {path.stat().st_uid}"
    except OSError:
        owner = "its owner is unknown"
    return f"{owner}, and this process is uid {os.geteuid()}"


def mode_of_own(path: Path) -> int | None:
    """Return the mode of a file that belongs to the user of this process, None for another's."""
    try:
        status = path.stat()
    except OSError:
        return None
    return stat.S_IMODE(status.st_mode) if status.st_uid == os.geteuid() else None
