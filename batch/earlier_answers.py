"""The good answers of an earlier run, from its output or its journal, so that only failed lines are retried."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batch.input_file import InputFile
from batch.journal import Journal
from batch.journal_record import JournalRecord
from batch.lines import BadLine, parse_line, shown_id
from batch.output_line import good_outcome
from wire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EarlierAnswers:
    """Successful answers in the file `place`.

    `wanted` maps the custom_id of each answer that is not yet in the journal to its request's position.
    `models` are the models that the server chose for lines without a `model`, according to their answers.
    """

    place: Path
    wanted: Mapping[str, int] = field(default_factory=dict)
    models: frozenset[str] = frozenset()

    def records(self) -> Iterator[JournalRecord]:
        """Yield the wanted answers. Raises ConfigError if the file no longer has some of them."""
        left = dict(self.wanted)
        if not left:
            return
        with contextlib.suppress(FileNotFoundError):
            for _, answered, line in _answered_lines(self.place):
                position = left.get(answered["custom_id"])
                outcome = None if position is None else good_outcome(answered, line)
                if position is not None and outcome is not None:
                    del left[answered["custom_id"]]
                    yield JournalRecord(position, outcome)
        if left:
            lost = f"answers missing: {len(left)}. Run the command again"
            raise ConfigError(f"{self.place} has changed since it was read; {lost}")


def answers_in_output(output: Path, source: InputFile, journal: Journal, check: Callable[[], None]) -> EarlierAnswers:
    """Read all of `output`, whose answers may be in any order, and return the answers to keep.

    `check` is called if the output has successful answers; it raises ConfigError if this run must not keep them.
    Raises ConfigError if there is no such file and the journal is empty, or if the file belongs to another input.
    """
    positions, without_model = _request_positions(source)
    good, models = dict[str, int](), set[str]()
    try:
        for number, answered, line in _answered_lines(output):
            custom_id = answered["custom_id"]
            if custom_id not in positions:
                problem = f"answers {shown_id(custom_id)}, which is not in the input"
                raise ConfigError(f"{output}: line {number} {problem}: this output belongs to another input")
            if good_outcome(answered, line) is not None:
                good[custom_id] = positions[custom_id]
                models |= _models(answered) if positions[custom_id] in without_model else frozenset()
    except FileNotFoundError:
        if journal.is_empty:
            remedy = "there are no failed lines to retry: run the batch without --retry-failed first"
            raise ConfigError(f"{output} does not exist, so {remedy}") from None
    if good:
        check()
    wanted = {custom_id: position for custom_id, position in good.items() if not journal.has(position)}
    return EarlierAnswers(output, wanted, frozenset(models))


def answers_in_journal(source: InputFile, journal: Journal) -> EarlierAnswers:
    """Return the models in the journal's good answers to lines without a `model`; the answers stay in the journal.

    Raises ConfigError.
    """
    models = set[str]()
    _, without_model = _request_positions(source)
    try:
        for position in without_model:
            if journal.has(position):
                models |= _models(parse_line(journal.line(position)[0]))
    except OSError as error:
        raise ConfigError(f"{journal.path}: {error.strerror}") from error
    return EarlierAnswers(journal.path, models=frozenset(models))


def _request_positions(source: InputFile) -> tuple[dict[str, int], set[int]]:
    """Return the positions of all requests by custom_id, and those of requests without a model."""
    positions, without_model = dict[str, int](), set[int]()
    for position in range(len(source)):
        request = parse_line(source.line(position))
        positions[request["custom_id"]] = position
        if _model(request.get("body")) is None:
            without_model.add(position)
    return positions, without_model


def _answered_lines(path: Path) -> Iterator[tuple[int, dict[str, Any], bytes]]:
    """Yield the lines of an output: number, object, bytes.

    Raises FileNotFoundError, and ConfigError for a file that cannot be read or a line that cannot be part of an output.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _parse_output_line(path, number, line), line.strip()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"{error.filename or path}: {error.strerror}") from error


def _parse_output_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        return parse_line(line)
    except BadLine as problem:
        raise ConfigError(f"{path}: line {number} {problem}: this file is not a batch output") from None


def _models(answered: Mapping[str, Any]) -> frozenset[str]:
    name = _model(answered["response"].get("body"))
    return frozenset() if name is None else frozenset((name,))


def _model(body: Any) -> str | None:
    name = body.get("model") if isinstance(body, dict) else None
    return name if isinstance(name, str) else None
