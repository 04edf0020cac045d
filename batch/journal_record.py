"""The lines of a journal: a header, then a record for each line that has its answer. Pure.

    header   CRC SP {"pdserve_batch_journal": 1, ...} LF
    record   CRC SP POSITION SP FAILED SP PROMPT_TOKENS SP COMPLETION_TOKENS SP {the output's line} LF

CRC is the CRC-32 of the text between it and LF, as 8 hex digits. So each line is checked by itself: one that was cut or
never reached the disk is detected anywhere in the file, and the others are still used.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from batch.output_line import LineOutcome

_CRC_CHARS = 8
_FORMAT = "pdserve_batch_journal"


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """The outcome of the request at `position` of the input."""

    position: int
    outcome: LineOutcome


def encode(record: JournalRecord) -> bytes:
    """Return the line of a record."""
    outcome = record.outcome
    counts = b"%d %d %d %d " % (record.position, outcome.failed, outcome.prompt_tokens, outcome.completion_tokens)
    return _with_checksum(counts + outcome.line)


def decode(line: bytes) -> JournalRecord | None:
    """Return the record of a line with its LF; None if it is not a complete record."""
    content = _checked_content(line)
    if content is None:
        return None
    try:
        position, failed, prompt_tokens, completion_tokens, output = content.split(b" ", 4)
        outcome = LineOutcome(output, failed == b"1", int(prompt_tokens), int(completion_tokens))
        return JournalRecord(int(position), outcome)
    except ValueError:
        return None


def encode_header(answer_settings: Mapping[str, Any]) -> bytes:
    """Return the first line of a journal."""
    return _with_checksum(orjson.dumps({_FORMAT: 1, **answer_settings}))


def decode_header(line: bytes) -> dict[str, Any] | None:
    """Return the answer settings in the first line; None if it is not a complete header."""
    content = _checked_content(line)
    try:
        answer_settings = None if content is None else orjson.loads(content)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(answer_settings, dict) or answer_settings.pop(_FORMAT, None) != 1:
        return None
    return answer_settings


def is_cut_header(line: bytes) -> bool:
    """Return whether a first line without LF may be an incomplete header, left by a run that was killed."""
    begin = b' {"%b":1' % _FORMAT.encode()
    rest = line[_CRC_CHARS:]
    is_ours = rest.startswith(begin) or begin.startswith(rest)
    return not line.endswith(b"\n") and is_ours and set(line[:_CRC_CHARS]) <= set(b"0123456789abcdef")


def _with_checksum(content: bytes) -> bytes:
    return b"%08x %b\n" % (zlib.crc32(content), content)


def _checked_content(line: bytes) -> bytes | None:
    content = line[_CRC_CHARS + 1 : -1]
    if line[-1:] != b"\n" or line[: _CRC_CHARS + 1] != b"%08x " % zlib.crc32(content):
        return None
    return content
