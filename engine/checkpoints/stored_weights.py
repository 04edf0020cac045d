"""Read a checkpoint's tensors directly from its safetensors files: only the bytes of the requested range are read.

part of dimension d  | on disk
d = 0                | one run of bytes
d > 0                | one run per index of the outer dimensions, at equal distances
"""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch

from engine.checkpoints.model_identity import StoredTensor, stored_tensors
from engine.checkpoints.weights import TensorSlice
from wire.errors import ConfigError

_PIECE_BYTES = 1 << 30  # per read; Linux reads at most 2 GiB at once
_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


class StoredWeights:
    """Implements Weights over a folder. Owns its open files; one thread reads. `bytes_read` counts what was read."""

    def __init__(self, path: Path) -> None:
        """Read the headers. Raises ConfigError."""
        self._tensors = {tensor.name: tensor for tensor in stored_tensors(path)}
        self._files: dict[Path, int] = {}
        self.bytes_read = 0

    @property
    def names(self) -> Sequence[str]:
        """All tensors, sorted."""
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's whole shape. Raises KeyError for an unknown name."""
        return self._tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return its stored dtype. Raises ConfigError for one that torch does not have."""
        stored = self._tensors[name]
        if stored.dtype not in _DTYPES:
            raise ConfigError(
                f"{stored.file}: tensor {name} is {stored.dtype}, which is not one of {', '.join(_DTYPES)}"
            )
        return _DTYPES[stored.dtype]

    def read(self, name: str, part: TensorSlice | None = None) -> torch.Tensor:
        """Return the whole tensor, or a range of one dimension, in newly allocated memory."""
        stored, dtype = self._tensors[name], self.dtype(name)
        needed = math.prod(stored.shape) * dtype.itemsize
        if stored.length != needed:
            raise ConfigError(
                f"{stored.file}: tensor {name} of shape {stored.shape} has {stored.length} bytes, but needs {needed}"
            )
        if part is None:
            part = TensorSlice(0, 0, stored.shape[0] if stored.shape else 1)
        shape = stored.shape or (1,)
        _check_part(name, shape, part)
        rows = math.prod(shape[: part.dim])
        item = math.prod(shape[part.dim + 1 :]) * dtype.itemsize
        taken = torch.empty(_cut(shape, part), dtype=dtype)
        if taken.numel():
            view = taken.view(-1).view(torch.uint8).numpy().data
            self._read_runs(stored, view, rows, shape[part.dim] * item, part.start * item)
        return taken.view(stored.shape) if not stored.shape else taken

    def close(self) -> None:
        """Close the files. Idempotent; reading opens them again."""
        while self._files:
            os.close(self._files.popitem()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _read_runs(self, stored: StoredTensor, view: memoryview, rows: int, stride: int, skip: int) -> None:
        """Fill `view` with `rows` equal runs: the i-th starts at byte i * `stride` + `skip`."""
        file, length = self._open(stored.file), len(view) // rows
        for row in range(rows):
            offset = stored.offset + row * stride + skip
            for start in range(0, length, _PIECE_BYTES):
                end = min(start + _PIECE_BYTES, length)
                _read_exactly(file, view[row * length + start : row * length + end], offset + start, stored)
        self.bytes_read += len(view)

    def _open(self, file: Path) -> int:
        if file not in self._files:
            try:
                self._files[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise ConfigError(f"{file} cannot be read: {error}") from error
        return self._files[file]


def _check_part(name: str, shape: tuple[int, ...], part: TensorSlice) -> None:
    if not 0 <= part.dim < len(shape) or not 0 <= part.start <= part.end <= shape[part.dim]:
        raise ValueError(f"{name} has shape {shape}: [{part.start}, {part.end}) is outside dimension {part.dim}")


def _cut(shape: tuple[int, ...], part: TensorSlice) -> tuple[int, ...]:
    return (*shape[: part.dim], part.end - part.start, *shape[part.dim + 1 :])


def _read_exactly(file: int, piece: memoryview, offset: int, stored: StoredTensor) -> None:
    while len(piece):
        try:
            count = os.preadv(file, [piece], offset)
        except OSError as error:
            raise ConfigError(f"{stored.file}: tensor {stored.name} cannot be read: {error}") from error
        if count == 0:
            raise ConfigError(f"{stored.file} ends inside tensor {stored.name}, at byte {offset}")
        piece, offset = piece[count:], offset + count
