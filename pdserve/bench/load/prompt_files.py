"""Read requests from files: JSON lines with prompts, and ShareGPT conversations."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class FilePrompt:
    """One prompt of a file; `answer` or `output_len`, if given, determines the length of its answer."""

    prompt: str
    output_len: int | None = None
    answer: str | None = None


def read_custom(path: Path) -> Iterator[FilePrompt]:
    """Yield a prompt for each line `{"prompt": "...", "output_tokens": 64}`; `output_tokens` is optional.

    Raises ConfigError.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _custom(f"--dataset-path {path}, line {number}", line)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset-path {path} cannot be read: {error}") from error


def read_sharegpt(path: Path) -> Iterator[FilePrompt]:
    """Yield the first question and its answer of each conversation that has both. Raises ConfigError."""
    try:
        conversations = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--dataset-path {path} cannot be read: {error}") from error
    if not isinstance(conversations, list):
        raise ConfigError(f"--dataset-path {path} is not a list of conversations as in ShareGPT's file")
    for one in conversations:
        turns = one.get("conversations") if isinstance(one, dict) else None
        if isinstance(turns, list) and len(turns) >= 2:
            question, answer = (turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2])
            if isinstance(question, str) and isinstance(answer, str) and question:
                yield FilePrompt(question, answer=answer)


def _custom(place: str, line: str) -> FilePrompt:
    try:
        fields: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place}: invalid JSON: {error}") from error
    prompt = fields.get("prompt") if isinstance(fields, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise ConfigError(f'{place}: it has no "prompt" text')
    tokens = fields.get("output_tokens")
    if tokens is not None and (not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1):
        raise ConfigError(f'{place}: "output_tokens" is {tokens!r}, but must be a number of at least 1')
    return FilePrompt(prompt, tokens)
