"""Choose tokens with native kernels (native/best.h, native/draw.h), without allocating tensors."""

import struct
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine.sampling.sampler import COLDEST
from engine.step import SampleRow
from native.engine_library import Threads

Place = Callable[[torch.Tensor], tuple[int, int, int, int]]
"""Returns a tensor's address, rows, columns, and row stride in floats."""

_DRAW = struct.Struct("=QQQfffIII")
"""struct draw."""
_HOTTEST = 3e38  # close to the largest float32
_NO_TOP_P = 2.0
_WORD = (1 << 64) - 1


class NativeChooser:
    """Chooser (engine/sampling/sampler.py) for float32 scores on the CPU with contiguous rows."""

    def __init__(self, best: Any, draw: Any, threads: Threads, place_of: Place) -> None:
        """`best` and `draw` are the library's functions; `threads` must stay open while this is used."""
        self._best, self._draw, self._threads, self._place_of = best, draw, threads, place_of

    def best(self, scores: torch.Tensor) -> tuple[list[int], list[float]]:
        """Return each row's best token and its score."""
        address, num_rows, num_columns, stride = self._place_of(scores)
        tokens, values = array("q", bytes(8 * num_rows)), array("f", bytes(4 * num_rows))
        self._best(
            self._threads.address, address, num_rows, num_columns, stride, tokens.buffer_info()[0],
            values.buffer_info()[0],
        )  # fmt: skip
        return tokens.tolist(), values.tolist()

    def draw(self, scores: torch.Tensor, places: Sequence[int], rows: Sequence[SampleRow]) -> list[int]:
        """Return a token for each of the rows at `places`. Raises MemoryError."""
        address, _, num_columns, stride = self._place_of(scores)
        draws = b"".join([_draw_of(rows[place], place, num_columns) for place in places])
        tokens = array("q", bytes(8 * len(places)))
        failed = self._draw(
            self._threads.address, address, num_columns, stride, draws, len(places),
            tokens.buffer_info()[0],
        )  # fmt: skip
        if failed:
            raise MemoryError(f"no memory to draw from {num_columns} tokens")
        return tokens.tolist()


def _draw_of(row: SampleRow, place: int, num_columns: int) -> bytes:
    params = row.params
    return _DRAW.pack(
        params.seed & _WORD, row.sequence, row.position, min(max(params.temperature, COLDEST), _HOTTEST),
        params.top_p if params.top_p < 1.0 else _NO_TOP_P, params.min_p,
        params.top_k if 0 < params.top_k < num_columns else 0, place, 0,
    )  # fmt: skip
