"""A note beside an output some of whose lines failed: what its answers depend on, for who asks those lines again.

One line, as a journal begins (journal_record.py).
"""

import errno
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


def check_place_of_note(path: Path, output: Path) -> None:
    """Raise ConfigError where something else than a note lies there: a run would replace or remove it."""
    _told(path, output)


def write_note(path: Path, binding: Mapping[str, Any]) -> None:
    """Put the note there, instead of the one that is there. Raises OSError, also where another file is."""
    if not _is_free(path):
        raise OSError(errno.EEXIST, "it is no note of ours", str(path))
    with WholeFile(path) as file:
        file.write(encode_header(binding))
        file.settle()
        file.appear()


def remove_note(path: Path) -> None:
    """Remove the note; another file stays. Raises OSError."""
    if _is_free(path):
        path.unlink(missing_ok=True)


def check_note(path: Path, binding: Mapping[str, Any], output: Path, journal: Path | None) -> None:
    """Raise ConfigError where the note says that the answers of `output` depend on something else than `binding`.

    `journal` is that of a run that was stopped, None where there is none.
    """
    told = _told(path, output)
    parted = None if told is None else difference(told, binding)
    if parted is None:
        return
    if journal is None:
        remedy = f"ask what failed as the rest was asked, or remove {path} to have both in one file"
    else:
        after = f"{journal} has those of a run after it that was stopped"
        remedy = f"{after}: end that one first, without asking what failed again"
    raise ConfigError(f"{output} has the answers of another run: {parted}; {remedy}")


def _told(path: Path, output: Path) -> dict[str, Any] | None:
    """Return what the note tells, None where there is none. Raises ConfigError where it is no note."""
    try:
        content = _content(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if content is None:
        return None
    told = decode_header(content)
    if told is None:
        words = f"remove it, or name another output than {output}"
        raise ConfigError(f"{path} is no note of ours, or is damaged: {words}")
    return told


def _is_free(path: Path) -> bool:
    content = _content(path)
    return content is None or decode_header(content) is not None


def _content(path: Path) -> bytes | None:
    """Return the file, as far as a note can reach; None where there is none. Raises OSError."""
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES)
    except FileNotFoundError:
        return None
