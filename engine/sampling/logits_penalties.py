"""Penalties and biases: make tokens that occurred before, or are listed, more or less likely.

For token j, which has logit x and occurs c times in the outputs:  x -> x + bias[j];  x -> x / r where x > 0, x * r
elsewhere, if j is in the prompt or the outputs (transformers' RepetitionPenaltyLogitsProcessor);
x -> x - c * frequency - (c > 0) * presence (the formula of OpenAI's API). Counts come with the row or from its history.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.step import SampleRow
from engine.token_counts import TokenCounts, has_penalty
from engine.transfers import upload, upload_ints

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]


def penalise(scores: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """Change `scores` [num_rows, vocab_size] float32, contiguous, in place."""
    _add_bias(scores, rows)
    counted = [i for i, row in enumerate(rows) if has_penalty(row.params)]
    if counted:
        _Counted(scores, rows, counted).penalise()


def _add_bias(scores: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    width = scores.shape[-1]
    places = [i * width + token for i, row in enumerate(rows) for token, _ in row.params.logit_bias]
    if places:
        bias = torch.tensor([bias for row in rows for _, bias in row.params.logit_bias], dtype=torch.float32)
        scores.view(-1).index_add_(0, upload_ints(places, scores.device), upload(bias, scores.device))


class _Counted:
    """The distinct tokens of all rows with penalties, row after row."""

    def __init__(self, scores: torch.Tensor, rows: Sequence[SampleRow], counted: list[int]) -> None:
        self._flat = scores.view(-1)
        self._rows = [rows[i] for i in counted]
        counts = [row.counts or TokenCounts().update(row.history, row.prompt_length) for row in self._rows]
        self._lengths = [len(one.ids) for one in counts]
        ids = [np.frombuffer(one.ids, np.int64) + i * scores.shape[-1] for i, one in zip(counted, counts, strict=True)]
        self._at = self._on_device(np.concatenate(ids))
        self._outputs = np.concatenate([np.frombuffer(one.outputs, np.int64) for one in counts])

    def penalise(self) -> None:
        """Apply the penalties to their scores."""
        old = self._flat[self._at]
        penalty = self._on_device(self._per_token([row.params.repetition_penalty for row in self._rows]))
        new = torch.where(old < 0, old * penalty, old / penalty)
        frequency = self._per_token([row.params.frequency_penalty for row in self._rows])
        presence = self._per_token([row.params.presence_penalty for row in self._rows])
        new -= self._on_device(frequency * self._outputs.astype(np.float32))
        new -= self._on_device(presence * (self._outputs > 0))
        self._flat[self._at] = new

    def _per_token(self, values: Sequence[float]) -> Floats:
        return np.repeat(np.array(values, np.float32), self._lengths)

    def _on_device(self, values: Floats | Integers) -> torch.Tensor:
        return upload(torch.from_numpy(values), self._flat.device)
