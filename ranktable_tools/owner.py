"""Say whose a file is: what one wants to know of a file that cannot be read."""

import os
from pathlib import Path


def whose(path: Path) -> str:
    """Return the owner of a file and the user of this process, in words."""
    try:
        owner = f"it belongs to uid {path.stat().st_uid}"
    except OSError:
        owner = "its owner cannot be told"
    return f"{owner}, and this process is uid {os.geteuid()}"
