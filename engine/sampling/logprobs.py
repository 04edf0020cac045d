"""Log probabilities (natural) of tokens from the raw logits in float32, with ranks and the best tokens."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from wire.types import TokenLogprobs

SLICE_BYTES = 16 << 20
"""Size of the [rows, vocab_size] float32 logits processed at once."""


def rows_at_once(vocab_size: int) -> int:
    """Return how many rows of float32 logits fit in SLICE_BYTES; at least one."""
    return max(1, SLICE_BYTES // (4 * vocab_size))


Wanted = int | tuple[int, ...]
"""How many of the best tokens, or which ids, a row requests in addition to its own."""


def by_wanted(wanted: Sequence[Wanted]) -> list[tuple[int | list[tuple[int, ...]], list[int]]]:
    """Group rows that request the same number of tokens, without rows that request none.

    A group is (number of best tokens, rows), or (the ids that each row requests, rows). No row's result depends on the
    grouping.
    """
    best, listed = dict[int, list[int]](), dict[int, tuple[list[tuple[int, ...]], list[int]]]()
    for row, what in enumerate(wanted):
        if isinstance(what, int):
            if what:
                best.setdefault(what, []).append(row)
        elif what:
            ids, rows = listed.setdefault(len(what), ([], []))
            ids.append(what)
            rows.append(row)
    return [*best.items(), *listed.values()]


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int] | Sequence[Sequence[int]], wanted: Sequence[Wanted]
) -> list[TokenLogprobs]:
    """Return for each row of `logits` [num_rows, vocab_size] its token's logprob and rank, and the `wanted` logprobs.

    Rows may have several tokens, the same number each: their results follow each other.
    Computed in slices, so that memory does not grow with the number of rows.
    """
    size = rows_at_once(logits.shape[-1])
    made: list[TokenLogprobs] = []
    for start in range(0, len(wanted), size):
        end = start + size
        made += _of_slice(logits[start:end], np.array(token_ids[start:end], np.int64), wanted[start:end])
    return made


def _of_slice(
    logits: torch.Tensor, token_ids: npt.NDArray[np.int64], wanted: Sequence[Wanted]
) -> Iterator[TokenLogprobs]:
    logits = logits.float()
    logprobs = logits.log_softmax(dim=-1)
    own = torch.from_numpy(token_ids).to(logits.device).reshape(len(wanted), -1)
    ranks = []  # by place in the row, then by row
    for one in torch.split(logits.gather(1, own), 1, dim=1):
        better = (logits > one).cpu().numpy()  # numpy counts a hundred times faster than torch
        ranks.append([1 + int(np.count_nonzero(row)) for row in better])
    requested = _requested(logits, logprobs, wanted)
    for i, values in enumerate(logprobs.gather(1, own).tolist()):
        for logprob, by_row in zip(values, ranks, strict=True):
            yield TokenLogprobs(logprob, by_row[i], *requested.get(i, ((), ())))


def _requested(
    logits: torch.Tensor, logprobs: torch.Tensor, wanted: Sequence[Wanted]
) -> dict[int, tuple[tuple[int, ...], tuple[float, ...]]]:
    """Return, by row, the ids and log probabilities of the wanted tokens."""
    requested = {}
    for what, rows in by_wanted(wanted):
        picked, probable = (logits, logprobs) if len(rows) == len(logits) else (logits[rows], logprobs[rows])
        if isinstance(what, int):
            ids = picked.topk(min(what, logits.shape[-1]), dim=-1).indices
        else:
            ids = torch.tensor(what, device=logits.device)
        values = probable.gather(1, ids)
        for row, row_ids, row_values in zip(rows, ids.tolist(), values.tolist(), strict=True):
            requested[row] = tuple(row_ids), tuple(row_values)
    return requested
