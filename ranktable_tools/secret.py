"""Keep the cluster secret beside the global table: what peers prove to each other."""

import secrets
from pathlib import Path

from ranktable_tools.json_file import write_private

SECRET_NAME = "cluster_secret"  # noqa: S105 - a file name


def ensure_secret(directory: Path) -> tuple[Path, bool]:
    """Write 32 random bytes as hex, mode 0600, unless the file exists; return its path and whether it is new."""
    path = directory / SECRET_NAME
    if path.exists():
        return path, False
    write_private(path, secrets.token_hex(32) + "\n")
    return path, True
