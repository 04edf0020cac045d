"""Device nodes of this machine, found by listing /dev: no tool is run."""

import re
from pathlib import Path


def has_node(pattern: str, dev: Path = Path("/dev")) -> bool:
    """Return whether a node's whole name matches `pattern`."""
    return dev.is_dir() and any(re.fullmatch(pattern, entry.name) for entry in dev.iterdir())
