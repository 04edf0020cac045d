"""Turn a pooled hidden state into the vector for the client. Plain arithmetic, in double precision."""

import math
from collections.abc import Sequence

from engine.pooling_settings import PoolingSettings
from wire.errors import InternalError, InvalidRequest
from wire.types import Pooling, SamplingParams


def finish_vector(values: Sequence[float], pooling: Pooling, settings: PoolingSettings) -> tuple[float, ...]:
    """Return the first `dimensions` values, normalised to length 1 if requested. A zero vector is not changed."""
    kept = tuple(values[: pooling.dimensions])
    normalize = settings.normalize if pooling.normalize is None else pooling.normalize
    length = math.hypot(*kept) if normalize else 0.0
    return tuple(value / length for value in kept) if length > 0 else kept


def check_numbers(values: Sequence[float]) -> None:
    """Raise InternalError for a result with NaN or infinite values, which JSON cannot represent."""
    bad = next((value for value in values if not math.isfinite(value)), None)
    if bad is not None:
        raise InternalError(f"the model's result for this text has {bad} among its {len(values)} values")


def check_dimensions(pooling: Pooling, hidden_size: int) -> None:
    """Raise InvalidRequest, with both numbers, if more dimensions are requested than there are."""
    if pooling.dimensions is not None and pooling.dimensions > hidden_size:
        raise InvalidRequest(
            f"dimensions is {pooling.dimensions}, the model's vectors have {hidden_size}", "dimensions"
        )


def check_one_answer(params: SamplingParams) -> None:
    """Raise InvalidRequest if a prompt with pooling, whose result is one vector or score, requests more sequences."""
    if params.width != 1:
        name = "n" if params.n != 1 else "best_of"
        raise InvalidRequest(f"{name} is {params.width}, must be 1 with pooling", name)
