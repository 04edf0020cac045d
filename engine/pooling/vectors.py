"""Turn a pooled hidden state into the vector for the client. Plain arithmetic, in double precision."""

import math
from collections.abc import Sequence

from engine.pooling_settings import PoolingSettings
from wire.errors import InternalError, InvalidRequest
from wire.types import Pooling, SamplingParams

MAX_TOKEN_VALUES = 2**21
"""The most values of a prompt that gets values for each token: 8 MiB as float32, half of the longest message."""


def finish_vector(values: Sequence[float], pooling: Pooling, settings: PoolingSettings) -> tuple[float, ...]:
    """Return the first `dimensions` values, normalised to length 1 if requested. A zero vector is not changed."""
    kept = tuple(values[: pooling.dimensions])
    normalize = settings.normalize if pooling.normalize is None else pooling.normalize
    length = math.hypot(*kept) if normalize else 0.0
    return tuple(value / length for value in kept) if length > 0 else kept


def check_kind(kind: str, supported: Sequence[str], name: str) -> None:
    """Raise InvalidRequest for a kind of pooling that the model `name` does not support."""
    if kind not in supported:
        raise InvalidRequest(f"task is {kind}, but {name} supports only {' and '.join(supported)}", "task")


def check_numbers(values: Sequence[float]) -> None:
    """Raise InternalError for a result with NaN or infinite values, which JSON cannot represent."""
    bad = next((value for value in values if not math.isfinite(value)), None)
    if bad is not None:
        raise InternalError(f"the model's result for this text has {bad} among its {len(values)} values")


def check_sizes(pooling: Pooling, num_tokens: int, width: int) -> None:
    """Raise InvalidRequest, with the numbers, for more dimensions than there are, or more values than fit a message.

    `width` is the number of values of one vector.
    """
    if pooling.dimensions is not None and pooling.dimensions > width:
        raise InvalidRequest(f"dimensions is {pooling.dimensions}, but the model's vectors have {width}", "dimensions")
    if pooling.of_tokens and num_tokens * width > MAX_TOKEN_VALUES:
        raise InvalidRequest(
            f"the text has {num_tokens} tokens with {width} values each, but the limit for {pooling.kind} is "
            f"{MAX_TOKEN_VALUES // width} tokens",
            "input",
        )


def check_one_answer(params: SamplingParams) -> None:
    """Raise InvalidRequest if a prompt with pooling requests more than one sequence."""
    if params.width != 1:
        name = "n" if params.n != 1 else "best_of"
        raise InvalidRequest(f"{name} is {params.width}, but must be 1 with pooling", name)
