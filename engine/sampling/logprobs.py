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


Wanted = int | tuple[int, ...]
"""How many of the best tokens, or which ones, are described beside a row's own."""


def by_wanted(wanted: Sequence[Wanted]) -> dict[Wanted, list[int]]:
    """Return the rows that want the same, nothing left out. Each is computed alone: a row depends on no neighbour."""
    rows: dict[Wanted, list[int]] = {}
    for row, what in enumerate(wanted):
        if what:
            rows.setdefault(what, []).append(row)
    return rows


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], wanted: Sequence[Wanted]) -> list[TokenLogprobs]:
    """Return for each row of `logits` [num_rows, vocab_size] its token's log probability and rank, and those wanted.

    Worked on in slices, so many rows take no more memory than a few.
    """
    size = rows_at_once(logits.shape[-1])
    told: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), size):
        end = start + size
        told += _of_slice(logits[start:end], token_ids[start:end], wanted[start:end])
    return told


def _of_slice(logits: torch.Tensor, token_ids: Sequence[int], wanted: Sequence[Wanted]) -> Iterator[TokenLogprobs]:
    logits = logits.float()
    logprobs = logits.log_softmax(dim=-1)
    own = torch.from_numpy(np.array(token_ids, np.int64)).to(logits.device)[:, None]
    better = (logits > logits.gather(1, own)).cpu().numpy()  # which numpy counts a hundred times faster than torch
    beside = _beside(logits, logprobs, wanted)
    return (
        TokenLogprobs(logprob, 1 + int(np.count_nonzero(better[i])), *beside.get(i, ((), ())))
        for i, logprob in enumerate(logprobs.gather(1, own).flatten().tolist())
    )


def _beside(
    logits: torch.Tensor, logprobs: torch.Tensor, wanted: Sequence[Wanted]
) -> dict[int, tuple[tuple[int, ...], tuple[float, ...]]]:
    """Return ids and log probabilities of the tokens wanted by row."""
    beside = {}
    for what, rows in by_wanted(wanted).items():
        picked, probable = (logits, logprobs) if len(rows) == len(logits) else (logits[rows], logprobs[rows])
        if isinstance(what, int):
            ids = picked.topk(min(what, logits.shape[-1]), dim=-1).indices
        else:
            ids = torch.tensor(what, device=logits.device).expand(len(rows), -1)
        values = probable.gather(1, ids)
        for row, row_ids, row_values in zip(rows, ids.tolist(), values.tolist(), strict=True):
            beside[row] = tuple(row_ids), tuple(row_values)
    return beside
