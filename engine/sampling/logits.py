"""Changes to logits before a token is chosen, as requested, in the order of vLLM and transformers.

    logit_bias -> repetition_penalty -> frequency_penalty -> presence_penalty     change scores
    allowed_token_ids, banned (stop ids before min_tokens, ends of bad words), grammar mask     set -inf

After these come temperature, top_k, top_p and min_p (sampler.py). The order of the bans does not matter: no operation
changes -inf. All operations are float32 and row by row, so rows do not affect each other.
"""

from collections.abc import Sequence

import torch

from engine.sampling.logits_bans import ban
from engine.sampling.logits_penalties import penalise
from engine.step import SampleRow
from engine.token_counts import has_penalty


def has_logit_changes(row: SampleRow) -> bool:
    """Return whether this row's logits have to be changed."""
    params = row.params
    return bool(
        params.logit_bias or params.allowed_token_ids or row.banned or row.mask is not None or has_penalty(params)
    )


def change_logits(scores: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Apply the parameters of `rows` to `scores` [num_rows, vocab_size] float32, contiguous, in place; return them."""
    penalise(scores, rows)
    ban(scores, rows)
    return scores
