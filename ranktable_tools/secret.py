"""Keep the cluster secret beside the global table: what peers prove to each other."""

import os
import secrets
from pathlib import Path

from ranktable_tools.errors import RanktableError

SECRET_NAME = "cluster_secret"  # noqa: S105 - a file name


def ensure_secret(directory: Path) -> tuple[Path, bool]:
    """Write 32 random bytes as hex, mode 0600, unless the file exists; return its path and whether it is new."""
    path = directory / SECRET_NAME
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path, False
    except OSError as error:
        raise RanktableError(f"{path}: cannot be written: {error.strerror}") from error
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32) + "\n")
    return path, True
