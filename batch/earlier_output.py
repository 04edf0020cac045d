"""The output of a run that ended: its good answers are taken over, so that only what failed is asked again."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from batch.input_file import InputFile
from batch.journal import Journal
from batch.journal_record import Record
from batch.lines import BadLine, parse_line, shown_id
from batch.output_line import Outcome, good_outcome
from wire.errors import ConfigError


def take_over(output: Path, source: InputFile, journal: Journal, check: Callable[[], None]) -> frozenset[str]:
    """Put the good answers of `output` into `journal`, for lines without one there; they may be in any order.

    `check` is called before, where there are any; it raises ConfigError for answers that are not to be mixed with
    others.

    Returns the models that its good answers to lines without a `model` name: nothing but what is served chose them.
    Raises ConfigError where there is no such file though the journal is empty, or it is not the output of this input;
    then nothing was put.
    """
    positions: dict[str, int] = {}
    nameless, models = set[int](), set[str]()
    for position in range(len(source)):
        request = parse_line(source.line(position))
        positions[request["custom_id"]] = position
        if _model(request.get("body")) is None:
            nameless.add(position)
    try:
        with output.open("rb") as file:
            if sum(1 for _ in _good(file, positions, output)):  # all of it is read before anything is kept
                check()
            file.seek(0)
            for position, outcome, model in _good(file, positions, output):
                if model is not None and position in nameless:
                    models.add(model)
                if not journal.has(position):
                    journal.append(Record(position, outcome))
    except FileNotFoundError:
        if journal.is_empty:
            words = "only the output of a run that ended has lines to ask again"
            raise ConfigError(f"{output} is not there: {words}") from None
    except OSError as error:
        raise ConfigError(f"{error.filename or output}: {error.strerror}") from error
    return frozenset(models)


def _good(file: BinaryIO, positions: Mapping[str, int], output: Path) -> Iterator[tuple[int, Outcome, str | None]]:
    """Yield the good answers, with the positions of their requests and the model that each names, if any.

    Raises ConfigError for a line that answers none.
    """
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
            yield positions[custom_id], outcome, _model(answered["response"].get("body"))


def _model(body: Any) -> str | None:
    name = body.get("model") if isinstance(body, dict) else None
    return name if isinstance(name, str) else None
