"""How likely tokens are, reckoned on a device behind the step that chose them, and read on the host later.

The same as logprobs.py tells: log probabilities of the raw logits in float32, ranks, and the best tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from engine.sampling.logprobs import rows_at_once
from engine.transfers import Download, upload_ints
from wire.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class _Best:
    """The best tokens of those rows that asked for as many."""

    rows: list[int]
    token_ids: torch.Tensor  # [len(rows), top] int64
    logprobs: torch.Tensor  # [len(rows), top]


@dataclass(frozen=True, slots=True)
class LogprobsToRead:
    """Of a slice of rows; all tensors are on the host, and have values once the download they went by has ended."""

    logprobs: torch.Tensor  # [num_rows]
    num_better: torch.Tensor  # [num_rows] int64
    best: tuple[_Best, ...]

    def read(self) -> Iterator[TokenLogprobs]:
        """Yield what is told of each row."""
        tops: dict[int, tuple[tuple[int, ...], tuple[float, ...]]] = {}
        for best in self.best:
            for row, ids, values in zip(best.rows, best.token_ids.tolist(), best.logprobs.tolist(), strict=True):
                tops[row] = tuple(ids), tuple(values)
        pairs = zip(self.logprobs.tolist(), self.num_better.tolist(), strict=True)
        for row, (logprob, num_better) in enumerate(pairs):
            yield TokenLogprobs(logprob, 1 + num_better, *tops.get(row, ((), ())))


def queue_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, tops: Sequence[int], download: Download
) -> list[LogprobsToRead]:
    """Reckon for each row of `logits` [num_rows, vocab_size] its token's likelihood and the `top` best, in slices.

    `token_ids` [num_rows] int64 lie on the same device.
    """
    size = rows_at_once(logits.shape[-1])
    starts = range(0, len(tops), size)
    return [_slice(logits[i : i + size], token_ids[i : i + size], tops[i : i + size], download) for i in starts]


def _slice(logits: torch.Tensor, token_ids: torch.Tensor, tops: Sequence[int], download: Download) -> LogprobsToRead:
    logits, own = logits.float(), token_ids[:, None]
    logprobs = logits.log_softmax(dim=-1)
    num_better = (logits > logits.gather(1, own)).sum(dim=-1)
    best = []
    for top in sorted({top for top in tops if top > 0}):
        rows = [i for i, wanted in enumerate(tops) if wanted == top]
        places = upload_ints(rows, logits.device)
        ids = logits.index_select(0, places).topk(min(top, logits.shape[-1]), dim=-1).indices
        values = logprobs.index_select(0, places).gather(1, ids)
        best.append(_Best(rows, download.take(ids), download.take(values)))
    return LogprobsToRead(download.take(logprobs.gather(1, own).squeeze(1)), download.take(num_better), tuple(best))
