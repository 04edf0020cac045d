"""Write a result to a file that the user named."""

import sys
from pathlib import Path

from wire.errors import ConfigError


def write_file(path: Path, content: bytes, *, appends: bool = False) -> None:
    """Write the file and its folders, and print its name. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab" if appends else "wb") as file:
            file.write(content)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error
    print(f"written: {path}", file=sys.stderr)
