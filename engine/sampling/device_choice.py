"""Choose one token for each sampled row on a device; the tokens stay there, and nothing waits for the device.

The formulas are those of engine/sampling/sampler.py; bans and penalties are applied first, as there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.sampling.logits import change_logits, has_logit_changes
from engine.sampling.sampler import Nucleus, draw
from engine.step import SampleRow
from engine.transfers import upload_ints


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """The tokens chosen, and each row's best score, which shows the host later whether any token could be chosen."""

    token_ids: torch.Tensor  # [num_rows] int64
    best: torch.Tensor  # [num_rows], of the scores' dtype


def choose(logits: torch.Tensor, rows: Sequence[SampleRow], nucleus: Nucleus | None = None) -> ChosenTokens:
    """Choose a token for each row of `logits` [num_rows, vocab_size]; `rows`, in the same order, has the parameters.

    `nucleus` finds the tokens of top_p, by default with torch. Ids are within the vocabulary even if no token can be
    chosen.
    """
    scores = _with_changed_logits(logits, rows)
    if not rows:
        return ChosenTokens(torch.empty(0, dtype=torch.int64, device=logits.device), scores[:, 0])
    best, token_ids = scores.max(dim=-1)
    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    if drawn:
        places = upload_ints(drawn, scores.device)
        tokens = draw(scores.index_select(0, places).float(), [rows[i] for i in drawn], nucleus)
        token_ids = token_ids.index_copy(0, places, tokens)
    return ChosenTokens(token_ids, best)


def _with_changed_logits(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Return the scores to choose from: the logits themselves if no row changes them."""
    changed = [i for i, row in enumerate(rows) if has_logit_changes(row)]
    if not changed:
        return logits
    places = upload_ints(changed, logits.device)
    new = change_logits(logits.index_select(0, places).float(), [rows[i] for i in changed])
    return logits.to(torch.float32, copy=True).index_copy_(0, places, new)
