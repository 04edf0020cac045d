"""What a request asks to be done with logits before a token is chosen, in the order of vLLM and transformers.

    logit_bias -> repetition_penalty -> frequency_penalty -> presence_penalty     change scores
    allowed_token_ids, banned (stop ids before min_tokens, ends of bad words), grammar mask     set -inf

After these come temperature, top_k, top_p and min_p (sampler.py). The bans may stand anywhere: nothing brings a
token back from -inf. All of it is float32 and row by row, so no row shows in another.
"""

from collections.abc import Sequence

import torch

from engine.sampling.logits_bans import ban
from engine.sampling.logits_penalties import penalise
from engine.step import SampleRow
from engine.token_counts import has_penalty


def is_shaped(row: SampleRow) -> bool:
    """Whether anything has to be done with this row's logits."""
    params = row.params
    return bool(
        params.logit_bias or params.allowed_token_ids or row.banned or row.mask is not None or has_penalty(params)
    )


def shape(scores: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Change `scores` [num_rows, vocab_size] float32, contiguous, in place as `rows` (same order) ask; return them."""
    penalise(scores, rows)
    ban(scores, rows)
    return scores
