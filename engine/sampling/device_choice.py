"""Choose one token for each sampled row on a device, and leave it there: nothing here waits for the device.

The formulas are those of engine/sampling/sampler.py; what a row may not choose is shaped before, as there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.sampling.logits import is_shaped, shape
from engine.sampling.sampler import draw
from engine.step import SampleRow
from engine.transfers import upload_ints


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """The tokens chosen, and the best scores, by which the host tells later where none could be."""

    token_ids: torch.Tensor  # [num_rows] int64
    best: torch.Tensor  # [num_rows], of the scores' dtype


def choose(logits: torch.Tensor, rows: Sequence[SampleRow]) -> ChosenTokens:
    """Choose a token for each row of `logits` [num_rows, vocab_size], as `rows` (same order) asks.

    Ids are within the vocabulary even where no token can be chosen.
    """
    scores = _shaped(logits, rows)
    if not rows:
        return ChosenTokens(torch.empty(0, dtype=torch.int64, device=logits.device), scores[:, 0])
    best, token_ids = scores.max(dim=-1)
    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    if drawn:
        places = upload_ints(drawn, scores.device)
        tokens = draw(scores.index_select(0, places).float(), [rows[i] for i in drawn])
        token_ids = token_ids.index_copy(0, places, tokens)
    return ChosenTokens(token_ids, best)


def _shaped(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Return the scores to choose from; the logits themselves where no row asks for anything else."""
    asked = [i for i, row in enumerate(rows) if is_shaped(row)]
    if not asked:
        return logits
    places = upload_ints(asked, logits.device)
    shaped = shape(logits.index_select(0, places).float(), [rows[i] for i in asked])
    return logits.to(torch.float32, copy=True).index_copy_(0, places, shaped)
