"""A note beside an output with failed lines: the settings on which its answers depend, for a later retry.

One line, in the format of a journal's header (journal_record.py).
"""

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batch.answer_settings import difference
from batch.journal_record import decode_header, encode_header
from batch.whole_file import WholeFile
from wire.errors import ConfigError

_MAX_BYTES = 2**20


def note_of(output: Path) -> Path:
    """Return the path of an output's note."""
    return output.with_name(output.name + ".asked")


def check_place_of_note(path: Path, output: Path) -> None:
    """Raise ConfigError if the file at `path` is not a note, because a run would overwrite or delete it."""
    _read(path, output)


def write_note(path: Path, answer_settings: Mapping[str, Any]) -> None:
    """Write the note, replacing an earlier one. Raises OSError, also if the file there is not a note."""
    if not _is_free(path):
        raise OSError(errno.EEXIST, "it is not a pdserve note", str(path))
    with WholeFile(path) as file:
        file.write(encode_header(answer_settings))
        file.flush()
        file.publish()


def remove_note(path: Path) -> None:
    """Delete the note; a file that is not a note is kept. Raises OSError."""
    if _is_free(path):
        path.unlink(missing_ok=True)


def check_note(path: Path, answer_settings: Mapping[str, Any], output: Path, journal: Path | None) -> None:
    """Raise ConfigError if the run that wrote `output` had other answer settings, according to its note.

    `journal` is the path of a stopped run's journal, None if there is none.
    """
    recorded = _read(path, output)
    changed = None if recorded is None else difference(recorded, answer_settings)
    if changed is None:
        return
    if journal is None:
        remedy = f"retry the failed lines with the first run's settings, or remove {path} to mix both runs' answers"
    else:
        later = f"{journal} holds the answers of a later run that was stopped"
        remedy = f"{later}: finish that run first, without --retry-failed"
    raise ConfigError(f"{output} has the answers of another run: {changed}; {remedy}")


def _read(path: Path, output: Path) -> dict[str, Any] | None:
    """Return the note's answer settings, None if there is no note. Raises ConfigError if it is not a note."""
    try:
        content = _note_content(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if content is None:
        return None
    recorded = decode_header(content)
    if recorded is None:
        remedy = f"remove it, or choose an output other than {output}"
        raise ConfigError(f"{path} is not a pdserve note, or is damaged: {remedy}")
    return recorded


def _is_free(path: Path) -> bool:
    content = _note_content(path)
    return content is None or decode_header(content) is not None


def _note_content(path: Path) -> bytes | None:
    """Return the file, up to the largest size of a note; None if there is none. Raises OSError."""
    try:
        with path.open("rb") as file:
            return file.read(_MAX_BYTES)
    except FileNotFoundError:
        return None
