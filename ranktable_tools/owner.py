"""Say whose a file is: what one wants to know of a file that cannot be read."""

import os
import stat
from pathlib import Path


def whose(path: Path) -> str:
    """Return the owner of a file and the user of this process, in words; the mode where they are one."""
    own_mode = mode_of_own(path)
    if own_mode is not None:
        return f"it belongs to uid {os.geteuid()}, who runs this, and has mode {own_mode:04o}"
    try:
        owner = f"it belongs to uid {path.stat().st_uid}"
    except OSError:
        owner = "its owner cannot be told"
    return f"{owner}, and this process is uid {os.geteuid()}"


def mode_of_own(path: Path) -> int | None:
    """Return the mode of a file that belongs to the user of this process, None for another's."""
    try:
        status = path.stat()
    except OSError:
        return None
    return stat.S_IMODE(status.st_mode) if status.st_uid == os.geteuid() else None
