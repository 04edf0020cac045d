"""Rotary embeddings by three positions of a token: each section of a head's dimensions follows one of them in turn.

sections (2, 3, 3): dimensions 0 and 1 of each half follow the time, 2 to 4 the height, 5 to 7 the width
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from wire.errors import ConfigError


class GridRotary(torch.nn.Module):
    """Wraps a rotary module of transformers so that it also accepts three positions for each token."""

    def __init__(self, rotary: Any, sections: Sequence[int]) -> None:
        super().__init__()
        self._rotary, self.sections = rotary, tuple(sections)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, [1, num_tokens, dim]. position_ids: [1, num_tokens], or [3, 1, num_tokens]."""
        if position_ids.dim() == 2:
            made: tuple[torch.Tensor, torch.Tensor] = self._rotary(x, position_ids)
            return made
        cosines, sines = zip(*(self._rotary(x, positions) for positions in position_ids), strict=True)
        return self._chosen(cosines), self._chosen(sines)

    def _chosen(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        half = torch.cat([values[part][..., columns] for part, columns in columns_of(self.sections)], dim=-1)
        return torch.cat((half, half), dim=-1)


def columns_of(sections: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Yield which of the three positions each range of a half's dimensions follows."""
    start = 0
    for number, size in enumerate(sections):
        yield number % 3, slice(start, start + size)
        start += size


def rotate_by_grid(network: Any, sections: Sequence[int]) -> None:
    """Let the network accept three positions for each token. Raises ConfigError if sections do not fit a head."""
    rotary = network.model.rotary_emb
    half = rotary.inv_freq.shape[0]
    if sum(sections) != half or min(sections) < 1:
        raise ConfigError(
            f"mrope_section is {list(sections)}, but must be positive numbers whose sum is {half}, "
            "the number of a head's frequencies"
        )
    network.model.rotary_emb = GridRotary(rotary, sections)
