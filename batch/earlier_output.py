"""The output of a run that ended: its good answers are taken over, so that only what failed is asked again."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from batch.input_file import InputFile
from batch.journal import Journal
from batch.journal_record import Record
from batch.lines import BadLine, parse_line, shown_id
from batch.output_line import Outcome, good_outcome
from wire.errors import ConfigError


def take_over(output: Path, source: InputFile, journal: Journal) -> None:
    """Put the good answers of `output` into `journal`, for lines without one there; they may be in any order.

    Raises ConfigError where there is no such file, or it is not the output of this input; then nothing was put.
    """
    positions = {parse_line(source.line(i))["custom_id"]: i for i in range(len(source))}
    try:
        with output.open("rb") as file:
            for _ in _good(file, positions, output):
                pass  # all of it is read before anything is kept
            file.seek(0)
            for position, outcome in _good(file, positions, output):
                if not journal.has(position):
                    journal.append(Record(position, outcome))
    except FileNotFoundError:
        if not journal.num_done:
            words = "only the output of a run that ended has lines to ask again"
            raise ConfigError(f"{output} is not there: {words}") from None
    except OSError as error:
        raise ConfigError(f"{error.filename or output}: {error.strerror}") from error


def _good(file: BinaryIO, positions: Mapping[str, int], output: Path) -> Iterator[tuple[int, Outcome]]:
    """Yield the good answers with the positions of their requests. Raises ConfigError for a line that answers none."""
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            answered = parse_line(line)
        except BadLine as problem:
            raise ConfigError(f"{output}: line {number} {problem}: it is no output of a batch") from None
        custom_id = answered["custom_id"]
        if custom_id not in positions:
            words = f"answers {shown_id(custom_id)}, which the input does not have: it is the output of another one"
            raise ConfigError(f"{output}: line {number} {words}")
        outcome = good_outcome(answered, line.strip())
        if outcome is not None:
            yield positions[custom_id], outcome
