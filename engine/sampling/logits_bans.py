"""Tokens that a row must not choose: their scores become -inf."""

from collections.abc import Sequence

import numpy as np
import torch

from engine.step import SampleRow
from engine.transfers import upload, upload_ints

_OFF = float("-inf")


def ban(scores: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """Set the tokens that rows must not choose to -inf in `scores` [num_rows, vocab_size], in place."""
    _ban_named(scores, rows)
    _keep_allowed(scores, rows)
    _keep_masked(scores, rows)


def _ban_named(scores: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    width = scores.shape[-1]
    places = [i * width + token for i, row in enumerate(rows) for token in row.banned if 0 <= token < width]
    if places:
        scores.view(-1).index_fill_(0, upload_ints(places, scores.device), _OFF)


def _keep_allowed(scores: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    limited = [i for i, row in enumerate(rows) if row.params.allowed_token_ids]
    if not limited:
        return
    banned = np.ones((len(limited), scores.shape[-1]), np.bool_)
    for place, i in enumerate(limited):
        ids = rows[i].params.allowed_token_ids
        banned[place, np.fromiter(ids, np.int64, len(ids))] = False
    _set_minus_inf(scores, limited, banned)


def _keep_masked(scores: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """Ban tokens outside the grammar masks; a mask may be shorter than a row of scores: the rest is banned."""
    masked = [i for i, row in enumerate(rows) if row.mask is not None]
    if not masked:
        return
    banned = np.ones((len(masked), scores.shape[-1]), np.bool_)
    for place, i in enumerate(masked):
        bits = np.unpackbits(np.frombuffer(rows[i].mask or b"", np.uint8), bitorder="little")[: scores.shape[-1]]
        banned[place, : len(bits)] = bits == 0
    _set_minus_inf(scores, masked, banned)


def _set_minus_inf(
    scores: torch.Tensor, which: list[int], banned: "np.ndarray[tuple[int, int], np.dtype[np.bool_]]"
) -> None:
    off = upload(torch.from_numpy(banned), scores.device)
    if len(which) == len(scores):
        scores.masked_fill_(off, _OFF)
    else:
        rows = upload_ints(which, scores.device)
        scores[rows] = scores[rows].masked_fill(off, _OFF)
