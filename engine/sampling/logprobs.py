"""How likely tokens are: log probabilities (natural) of the raw logits in float32, ranks, and the best tokens."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from wire.types import TokenLogprobs

SLICE_BYTES = 16 << 20
"""Of [rows, vocab_size] float32 that is worked on at once where there are many rows."""


def rows_at_once(vocab_size: int) -> int:
    """Return how many rows of float32 logits make a slice of SLICE_BYTES; at least one."""
    return max(1, SLICE_BYTES // (4 * vocab_size))


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], tops: Sequence[int]) -> list[TokenLogprobs]:
    """Return for each row of `logits` [num_rows, vocab_size] its token's log probability and rank, and the `top` best.

    Worked on in slices, so many rows take no more memory than a few.
    """
    size = rows_at_once(logits.shape[-1])
    told: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), size):
        end = start + size
        told += _of_slice(logits[start:end], token_ids[start:end], tops[start:end])
    return told


def _of_slice(logits: torch.Tensor, token_ids: Sequence[int], tops: Sequence[int]) -> Iterator[TokenLogprobs]:
    logits = logits.float()
    logprobs = logits.log_softmax(dim=-1)
    own = torch.from_numpy(np.array(token_ids, np.int64)).to(logits.device)[:, None]
    better = (logits > logits.gather(1, own)).cpu().numpy()  # which numpy counts a hundred times faster than torch
    best = _best(logits, logprobs, tops)
    return (
        TokenLogprobs(logprob, 1 + int(np.count_nonzero(better[i])), *best.get(i, ((), ())))
        for i, logprob in enumerate(logprobs.gather(1, own).flatten().tolist())
    )


def _best(
    logits: torch.Tensor, logprobs: torch.Tensor, tops: Sequence[int]
) -> dict[int, tuple[tuple[int, ...], tuple[float, ...]]]:
    """Return ids and log probabilities of the best tokens by row.

    Each number that is asked for is sorted out alone: which of equal logits are taken must not depend on neighbours.
    """
    best = {}
    for top in sorted({top for top in tops if top > 0}):
        rows = [i for i, wanted in enumerate(tops) if wanted == top]
        picked, probable = (logits, logprobs) if len(rows) == len(logits) else (logits[rows], logprobs[rows])
        ids = picked.topk(min(top, logits.shape[-1]), dim=-1).indices
        values = probable.gather(1, ids)
        for row, row_ids, row_values in zip(rows, ids.tolist(), values.tolist(), strict=True):
            best[row] = tuple(row_ids), tuple(row_values)
    return best
