"""Random numbers for sampling from a counter hash: a draw depends only on seed, sequence and position.

Constants: splitmix64's increment and finaliser (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators).
"""

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Integer = TypeVar("Integer", int, "npt.NDArray[Any]")

_MASK = (1 << 64) - 1
_INCREMENT = 0x9E3779B97F4A7C15
_BITS = 24


def uniform(seed: int, sequence: int, position: int) -> float:
    """Return a number in [0, 1) with 24 bits, exact in float32, for output `position` of `sequence` under `seed`."""
    return (hash64(seed, sequence, position) >> (64 - _BITS)) / (1 << _BITS)


def uniforms(
    seeds: "npt.NDArray[np.uint64]", sequences: "npt.NDArray[np.uint64]", positions: "npt.NDArray[np.uint64]"
) -> "npt.NDArray[np.float64]":
    """Return `uniform` of each triple."""
    return (hash64(seeds, sequences, positions) >> (64 - _BITS)) / (1 << _BITS)


def hash64(*words: Integer) -> Integer:
    """Return 64 bits that depend on every word (its low 64 bits) and on their order.

    Words may be arrays: their arithmetic wraps around, so the masks have no effect.
    """
    state: Any = 0
    for word in words:
        state = _mix(((state ^ word) + _INCREMENT) & _MASK)
    return state  # type: ignore[no-any-return]


def _mix(value: Integer) -> Integer:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)  # type: ignore[no-any-return]
