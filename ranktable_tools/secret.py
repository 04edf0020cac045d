"""Keep the cluster secret beside the global table: what peers prove to each other."""

import os
import secrets
from pathlib import Path

from ranktable_tools.errors import RanktableError
from ranktable_tools.json_file import write_private
from ranktable_tools.owner import whose

SECRET_NAME = "cluster_secret"  # noqa: S105 - a file name
_CURE = "run as that user, or as root with --owner UID"


def ensure_secret(directory: Path) -> tuple[Path, bool]:
    """Write 32 random bytes as hex, mode 0600, unless the file exists; return its path and whether it is new.

    Raises RanktableError naming path, owner and uid where it exists and this process cannot read it.
    """
    path = directory / SECRET_NAME
    if check_secret(directory):
        return path, False
    write_private(path, secrets.token_hex(32) + "\n")
    return path, True


def check_secret(directory: Path) -> bool:
    """Tell whether there is a secret. Raises RanktableError naming path, owner and uid of one that cannot be read."""
    path = directory / SECRET_NAME
    try:
        with path.open("rb") as file:
            file.read(1)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise RanktableError(f"{path}: cannot be read: {error.strerror}; {whose(path)}: {_CURE}") from error
    return True


def give(path: Path, owner: int) -> None:
    """Make a file that uid's. Raises RanktableError naming path, owner and uid where that is not allowed."""
    try:
        if owner < 0:
            raise RanktableError(f"--owner is {owner}; must be a uid of 0 or more")
        os.chown(path, owner, -1)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RanktableError(f"{path}: cannot be given to uid {owner}: {reason}; {whose(path)}: {_CURE}") from error
