"""Convert a GGUF file's RoPE scaling to transformers' rope_parameters.

Llama 3.1 and later store a divisor for each frequency (`rope_freqs.weight` [head_dim / 2]), not the rule that produced
it: rope type llama3 with 1 and 4 as factors of low and high frequencies over 8,192 positions. The rule is recovered
from the largest divisor, and every divisor is checked.
"""

import math
from typing import Any

import numpy as np

from wire.errors import ConfigError

ROPE_TENSOR = "rope_freqs.weight"
_LOW, _HIGH, _ORIGINAL_LENGTH = 1.0, 4.0, 8192
_TOLERANCE = 1e-4


def rope_parameters(fields: dict[str, Any], divisors: Any | None) -> dict[str, Any]:
    """Return transformers' parameters. Raises ConfigError for unsupported scaling, with its name or a divisor."""
    rope = f"{fields['general.architecture']}.rope"
    theta, scaling = fields.get(f"{rope}.freq_base", 10000.0), fields.get(f"{rope}.scaling.type", "none")
    if scaling != "none":
        raise ConfigError(f"this GGUF scales its rotary positions ({scaling}), which is not supported")
    if divisors is None:
        return {"rope_type": "default", "rope_theta": theta}
    factor = float(np.max(divisors))
    expected = _llama3_divisors(theta, len(divisors), factor)
    for index, (stored, made) in enumerate(zip(divisors, expected, strict=True)):
        if abs(stored - made) > _TOLERANCE * made:
            raise ConfigError(
                f"this GGUF divides rotary frequency {index} by {stored:g}, but Llama 3's rule divides it by {made:g}"
            )
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": round(factor, 4),
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _ORIGINAL_LENGTH,
    }


def _llama3_divisors(theta: float, count: int, factor: float) -> list[float]:
    """Return 1 for short waves, `factor` for long ones, and a smooth interpolation between them."""
    divisors = []
    for index in range(count):
        turns = _ORIGINAL_LENGTH / (2 * math.pi * theta ** (index / count))  # full turns over the original length
        share = min(max((turns - _LOW) / (_HIGH - _LOW), 0.0), 1.0)
        divisors.append(1 / ((1 - share) / factor + share))
    return divisors
