"""A trace: the arrival time and lengths of each request. Generated from a rate, or read from a published format."""

import csv
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scheduler.request_class import UNCLASSED, RequestClass
from wire.errors import ConfigError

_MAX_TOKENS = 1_000_000
_BLOCK_TOKENS = 512
_VOCABULARY = 1 << 20
_BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request of a trace: its arrival in seconds after the trace's start, and its lengths in tokens.

    `blocks` are the ids of the prompt's blocks of 512 tokens: prompts that begin with the same ids begin with the same
    tokens. A prompt without ids shares no prefix with others.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    blocks: tuple[int, ...] = ()
    request_class: RequestClass = UNCLASSED


def poisson(count: int, rate: float, num_prompt_tokens: int, num_output_tokens: int, seed: int) -> list[TraceRequest]:
    """Return requests of one size that arrive at `rate` per second on average; all at once if `rate` is 0."""
    numbers, now, requests = random.Random(seed), 0.0, []  # noqa: S311 - no secrets
    for _ in range(count):
        now += numbers.expovariate(rate) if rate else 0.0
        requests.append(TraceRequest(now, num_prompt_tokens, num_output_tokens))
    return requests


def read_trace(path: Path) -> list[TraceRequest]:
    """Return the requests of a file, sorted by arrival, the first at 0 s. Failed ones (no output tokens) are left out.

    Formats: Mooncake's, a JSON object in each line with `timestamp` (ms), `input_length`, `output_length` and perhaps
    `hash_ids`, which name the prompt's blocks; and BurstGPT's, CSV with the columns `Timestamp` (s), `Request tokens`
    and `Response tokens`. Raises ConfigError.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            is_json = file.read(1) == "{"
            file.seek(0)
            rows = list(_mooncake(file) if is_json else _burstgpt(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error.strerror if isinstance(error, OSError) else 'not UTF-8'}") from None
    except _BadLine as error:
        raise ConfigError(f"{path}: {error}") from None
    if not rows:
        raise ConfigError(f"{path} has no request with output tokens")
    begun = min(row.arrival_s for row in rows)
    return sorted((replace(row, arrival_s=row.arrival_s - begun) for row in rows), key=lambda row: row.arrival_s)


class _BadLine(Exception):
    pass


def _mooncake(lines: Iterable[str]) -> Iterator[TraceRequest]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise _BadLine(f"line {number} is not a JSON object")
        blocks = row.get("hash_ids") or ()
        if not isinstance(blocks, (list, tuple)) or not all(type(block) is int and block >= 0 for block in blocks):
            raise _BadLine(f"line {number}: hash_ids is not a list of numbers")
        for request in _request(number, row, ("timestamp", "input_length", "output_length"), 1000.0):
            yield replace(request, blocks=tuple(blocks))


def _burstgpt(lines: Iterable[str]) -> Iterator[TraceRequest]:
    rows = csv.DictReader(lines)
    missing = [name for name in _BURSTGPT if name not in (rows.fieldnames or ())]
    if missing:
        raise _BadLine(f"neither JSON lines nor CSV with the columns {', '.join(_BURSTGPT)}")
    for row in rows:
        yield from _request(rows.line_num, row, _BURSTGPT, 1.0)


def _request(number: int, row: Mapping[str, Any], names: Sequence[str], per_second: float) -> Iterator[TraceRequest]:
    values = []
    for name in names:
        try:
            values.append(float(row[name]))
        except (KeyError, TypeError, ValueError):
            raise _BadLine(f"line {number}: {name} is {row.get(name)!r}, not a number") from None
        limit = _MAX_TOKENS if len(values) > 1 else 1e15
        if not 0 <= values[-1] < limit:  # also false for NaN
            raise _BadLine(f"line {number}: {name} is {row[name]}, but must be at least 0 and below {limit:g}")
    arrival, num_prompt_tokens, num_output_tokens = values
    if num_output_tokens >= 1:
        yield TraceRequest(arrival / per_second, max(1, int(num_prompt_tokens)), int(num_output_tokens))


def prompt_of(number: int, request: TraceRequest) -> tuple[int, ...]:
    """Return token ids for request `number`."""
    length = request.num_prompt_tokens
    if not request.blocks:
        return (number % _VOCABULARY, *range(1, length))
    ids = [token for block in request.blocks for token in (block % _VOCABULARY, *range(1, _BLOCK_TOKENS))]
    return (*ids, *range(len(ids), length))[:length]
