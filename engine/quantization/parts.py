"""The stored tensors that one quantised module is made of, checked by shape and dtype before anything is read."""

import torch

from engine.checkpoints.weights import TensorSlice, Weights
from wire.errors import ConfigError

WORDS = (torch.int32,)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def matrix_shape(stored: Weights, name: str, dtypes: tuple[torch.dtype, ...]) -> tuple[int, int]:
    """Return the shape of a stored matrix. Raises ConfigError if missing, empty or not a matrix of `dtypes`."""
    shape, dtype = part_shape(stored, name), stored.dtype(name)
    if len(shape) != 2 or 0 in shape:
        raise ConfigError(f"{name} has shape {shape}: only matrices are dequantised")
    if dtype not in dtypes:
        raise ConfigError(f"{name} is {dtype}, not one of {', '.join(map(str, dtypes))}")
    return shape[0], shape[1]


def part_shape(stored: Weights, name: str) -> tuple[int, ...]:
    """Return the shape of a tensor. Raises ConfigError if it is missing."""
    try:
        return stored.shape(name)
    except KeyError as error:
        raise ConfigError(f"{name} is missing, though its module is stored quantised") from error


def read_groups(stored: Weights, name: str, inputs: range, num_groups: int) -> torch.Tensor:
    """Return the group of each input [len(inputs)] int64. Raises ConfigError for a group out of range."""
    groups = stored.read(name, TensorSlice(0, inputs.start, inputs.stop)).to(torch.int64)
    low, high = int(groups.min()), int(groups.max())
    if not 0 <= low <= high < num_groups:
        raise ConfigError(f"{name} has group indices {low} to {high}, but they must be from 0 to {num_groups - 1}")
    return groups


def packed_shapes(stored: Weights, module: str) -> dict[str, tuple[int, int]]:
    """Return the shapes of qweight, qzeros and scales, which GPTQ and AWQ share. Raises ConfigError."""
    dtypes = {"qweight": WORDS, "qzeros": WORDS, "scales": FLOATS}
    return {part: matrix_shape(stored, f"{module}.{part}", allowed) for part, allowed in dtypes.items()}
