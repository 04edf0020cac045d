"""Random prompts: token ids for completions, words of about one token each for a chat."""

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.bench.load.load_request import LoadRequest
from wire.errors import ConfigError

FIRST_ID, MAX_IDS, UNKNOWN_VOCABULARY = 100, 40_000, 1_000
_WORDS = re.findall(
    r"\w+",
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but "
    "not what all were we when your can said there use an each which she do how their if will up other about out many "
    "then them these so some her would make like him into time has look two more write go see number no way could "
    "people my than first water been call who oil its now find long down day did get come made may part",
)


@dataclass(frozen=True, slots=True)
class RequestSizes:
    """Sizes of random requests, in tokens; lengths are uniform within `ratio` below and above them."""

    input_len: int
    output_len: int
    ratio: float = 0.0
    prefix_len: int = 0

    def __post_init__(self) -> None:
        if self.input_len < 1 or self.output_len < 1 or self.prefix_len < 0:
            message = f"--random-input-len {self.input_len} --random-output-len {self.output_len}"
            raise ConfigError(f"{message} --random-prefix-len {self.prefix_len}: these must be at least 1, 1 and 0")
        if not 0 <= self.ratio < 1:
            raise ConfigError(f"--random-range-ratio {self.ratio:g} is not in [0, 1)")

    @property
    def longest(self) -> int:
        """The tokens of the longest prompt and answer together."""
        return (
            self.prefix_len
            + _length_range(self.input_len, self.ratio)[1]
            + _length_range(self.output_len, self.ratio)[1]
        )


def make_random_requests(
    count: int, shape: RequestSizes, numbers: random.Random, *, vocabulary: int | None
) -> list[LoadRequest]:
    """Return requests of token ids, from 100 up to `vocabulary` but below 40,000; of words if `vocabulary` is None."""
    source: Sequence[int | str] = _WORDS if vocabulary is None else _usable_ids(vocabulary)
    prefix = numbers.choices(source, k=shape.prefix_len)
    return [_request(shape, source, prefix, numbers) for _ in range(count)]


def _request(
    shape: RequestSizes, source: Sequence[int | str], prefix: Sequence[int | str], numbers: random.Random
) -> LoadRequest:
    size = numbers.randint(*_length_range(shape.input_len, shape.ratio))
    drawn = [*prefix, *numbers.choices(source, k=size)]
    out = numbers.randint(*_length_range(shape.output_len, shape.ratio))
    if isinstance(source, range):
        return LoadRequest(tuple(int(token) for token in drawn), out)
    return LoadRequest(" ".join(map(str, drawn)), out)


def _usable_ids(vocabulary: int) -> range:
    if vocabulary <= FIRST_ID:
        raise ConfigError(f"--vocab-size {vocabulary} is too small: random prompts use token ids from {FIRST_ID}")
    return range(FIRST_ID, min(vocabulary, MAX_IDS))


def _length_range(length: int, ratio: float) -> tuple[int, int]:
    return max(1, math.floor(length * (1 - ratio))), max(1, math.ceil(length * (1 + ratio)))
