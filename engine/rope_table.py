"""Cosine and sine tables by position, computed by a model's own rotary module."""

from typing import Any

import torch

from engine.grid_rotary import columns_of

_FIRST = 1024


class RopeTable:
    """Owns two tables that grow to the largest reserved position. For rope types that depend only on positions."""

    def __init__(self, rotary: Any, dtype: torch.dtype) -> None:
        """`rotary` is called as transformers calls it; `dtype` is that to which the model rounds cosines and sines."""
        self._rotary, self._dtype = rotary, dtype
        self.cosine, self.sine = self._compute(0, _FIRST)
        self.num_positions = _FIRST

    def reserve(self, length: int) -> None:
        """Extend the tables to positions [0, length): [positions, head_dim / 2] float32."""
        have = self.num_positions
        if length <= have:
            return
        cosine, sine = self._compute(have, max(length, 2 * have))
        self.cosine, self.sine = torch.cat([self.cosine, cosine]), torch.cat([self.sine, sine])
        self.num_positions = len(self.cosine)

    def at_grid(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both tables' rows for three positions of each token, [num_tokens, 3]: [num_tokens, head_dim / 2]."""
        parts = list(columns_of(self._rotary.sections))
        cosine, sine = (
            torch.cat([table[positions[:, part], columns] for part, columns in parts], dim=1)
            for table in (self.cosine, self.sine)
        )
        return cosine, sine

    def _compute(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        like = torch.zeros(1, dtype=self._dtype)
        cosine, sine = self._rotary(like, torch.arange(start, end)[None])
        half = cosine.shape[-1] // 2
        return cosine[0, :, :half].float().contiguous(), sine[0, :, :half].float().contiguous()
