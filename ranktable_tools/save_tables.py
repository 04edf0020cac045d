"""Write several files or none: duplicate names and inputs that would be overwritten are detected first."""

import os
from collections.abc import Sequence
from pathlib import Path

from ranktable_tools.errors import RanktableError
from ranktable_tools.json_file import write_private


def check_names(names: Sequence[tuple[str, str]]) -> None:
    """Raise RanktableError for a duplicate file name; each name is paired with what the file describes."""
    owner_by_name: dict[str, str] = {}
    for name, owner in names:
        first = owner_by_name.setdefault(name, owner)
        if first != owner:
            raise RanktableError(f"{first} and {owner} would both be written to {name}; nothing was written")


def check_inputs(flag: str, inputs: Sequence[str], outputs: Sequence[Path]) -> None:
    """Raise RanktableError for a repeated input, or one that an output would overwrite."""
    for number, path in enumerate(inputs):
        repeated = next((other for other in inputs[:number] if _is_same(other, Path(path))), None)
        if repeated is not None:
            raise RanktableError(f"{flag} has {path} twice; nothing was written")
        if any(_is_same(path, output) for output in outputs):
            raise RanktableError(f"{path} is an input and would be overwritten; nothing was written: use another path")


def make_directory(save_dir: str) -> None:
    """Make the folder for the files. Raises RanktableError naming it."""
    if not save_dir:
        raise RanktableError("--save-dir is empty; is a variable not set?")
    try:
        os.makedirs(save_dir, exist_ok=True)
    except OSError as error:
        raise RanktableError(f"--save-dir {save_dir}: cannot be created: {error.strerror}") from error


def save(folder: str, texts: Sequence[tuple[str, str]]) -> list[str]:
    """Write each text to its file, mode 0600, and return the paths."""
    make_directory(folder)
    paths = [os.path.join(folder, name) for name, _ in texts]
    for path, (_, text) in zip(paths, texts, strict=True):
        write_private(Path(path), text)
    return paths


def _is_same(path: str, other: Path) -> bool:
    return os.path.realpath(path) == os.path.realpath(other)
