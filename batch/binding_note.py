"""A note beside an output some of whose lines failed: what its answers depend on, for who asks those lines again.

One line, as a journal begins (journal_record.py).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batch.binding import difference
from batch.journal_record import decode_header, encode_header
from batch.whole_file import WholeFile
from wire.errors import ConfigError

_MOST_BYTES = 2**20


def note_of(output: Path) -> Path:
    """Return where the note of an output lies."""
    return output.with_name(output.name + ".asked")


def write_note(path: Path, binding: Mapping[str, Any]) -> None:
    """Put the note there, instead of the one that is there. Raises OSError."""
    with WholeFile(path) as file:
        file.write(encode_header(binding))
        file.settle()
        file.appear()


def check_note(path: Path, binding: Mapping[str, Any], output: Path) -> None:
    """Raise ConfigError where the note says that the answers of `output` depend on something else than `binding`."""
    try:
        with path.open("rb") as file:
            told = decode_header(file.read(_MOST_BYTES))
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if told is None:
        raise ConfigError(f"{path} is no note of ours, or is damaged: remove it to ask the failed lines all the same")
    parted = difference(told, binding)
    if parted is not None:
        raise ConfigError(
            f"{output} has the answers of another run: {parted}; ask what failed as the rest was asked, or remove "
            f"{path} to have both in one file"
        )
