"""Log probabilities of tokens, computed on a device after the step that chose them, and read on the host later.

The results are those of logprobs.py: log probabilities of the raw logits in float32, ranks, and the best tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from engine.sampling.logprobs import Wanted, by_wanted, rows_at_once
from engine.transfers import Download, upload_ints
from wire.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class _ExtraTokens:
    """The additional tokens of the rows that requested the same ones."""

    rows: list[int]
    token_ids: torch.Tensor  # [len(rows), num_wanted] int64
    logprobs: torch.Tensor  # [len(rows), num_wanted]


@dataclass(frozen=True, slots=True)
class LogprobsToRead:
    """Results for a slice of rows. All tensors are on the host, and valid once the download has ended."""

    logprobs: torch.Tensor  # [num_rows, tokens per row]
    num_better: torch.Tensor  # [num_rows, tokens per row] int64
    best: tuple[_ExtraTokens, ...]

    def read(self) -> Iterator[TokenLogprobs]:
        """Yield the log probabilities of each row's tokens."""
        tops: dict[int, tuple[tuple[int, ...], tuple[float, ...]]] = {}
        for best in self.best:
            for row, ids, values in zip(best.rows, best.token_ids.tolist(), best.logprobs.tolist(), strict=True):
                tops[row] = tuple(ids), tuple(values)
        pairs = zip(self.logprobs.tolist(), self.num_better.tolist(), strict=True)
        for row, of_row in enumerate(pairs):
            for logprob, num_better in zip(*of_row, strict=True):
                yield TokenLogprobs(logprob, 1 + num_better, *tops.get(row, ((), ())))


def queue_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, wanted: Sequence[Wanted], download: Download
) -> list[LogprobsToRead]:
    """Compute for each row of `logits` [num_rows, vocab_size] its tokens' logprobs and the `wanted` ones, in slices.

    `token_ids` [num_rows] or [num_rows, tokens per row] int64 are on the same device.
    """
    size = rows_at_once(logits.shape[-1])
    starts = range(0, len(wanted), size)
    return [
        _slice_logprobs(logits[i : i + size], token_ids[i : i + size], wanted[i : i + size], download) for i in starts
    ]


def _slice_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, wanted: Sequence[Wanted], download: Download
) -> LogprobsToRead:
    logits, own = logits.float(), token_ids.reshape(len(wanted), -1)
    logprobs = logits.log_softmax(dim=-1)
    parts = torch.split(logits.gather(1, own), rows_at_once(logits.shape[-1]), dim=1)  # a row may have many tokens
    num_better = torch.cat([(logits[:, None] > part[..., None]).sum(dim=-1) for part in parts], dim=1)
    best = []
    for what, rows in by_wanted(wanted):
        places = upload_ints(rows, logits.device)
        if isinstance(what, int):
            ids = logits.index_select(0, places).topk(min(what, logits.shape[-1]), dim=-1).indices
        else:
            ids = upload_ints([one for ids in what for one in ids], logits.device).reshape(len(rows), -1)
        values = logprobs.index_select(0, places).gather(1, ids)
        best.append(_ExtraTokens(rows, download.take(ids), download.take(values)))
    return LogprobsToRead(download.take(logprobs.gather(1, own)), download.take(num_better), tuple(best))
