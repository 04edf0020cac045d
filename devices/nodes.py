"""Device nodes of this machine: nothing is run and nobody is asked."""

import re
from pathlib import Path


def has_node(pattern: str, dev: Path = Path("/dev")) -> bool:
    """Whether a node's name matches `pattern`, whole."""
    return dev.is_dir() and any(re.fullmatch(pattern, entry.name) for entry in dev.iterdir())
