"""Penalties and biases: token ids that are there already, or are named, become more or less likely.

For token j, logit x, c outputs that are j:  x -> x + bias[j];  x -> x / r where x > 0, x * r elsewhere, if j is in the
prompt or the outputs (transformers' RepetitionPenaltyLogitsProcessor);  x -> x - c * frequency - (c > 0) * presence
(the formula of OpenAI's API). Counts are made anew from the history at every step, which keeps no state to rebuild.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.interface import SampleRow

Places = npt.NDArray[np.int64]
"""Indices into the flattened scores: row * vocab_size + token id."""


def penalise(scores: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """Change `scores` [num_rows, vocab_size] float32, contiguous, in place."""
    for change in (_add_bias, _divide_by_repetition, _subtract_counts):
        change(scores, rows)


def _add_bias(scores: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    places, lengths = _places(scores, rows, lambda row: [token for token, _ in row.params.logit_bias])
    if sum(lengths):
        bias = torch.tensor([bias for row in rows for _, bias in row.params.logit_bias], dtype=torch.float32)
        scores.view(-1).index_add_(0, _on(scores, places), bias.to(scores.device))


def _divide_by_repetition(scores: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    places, lengths = _places(scores, rows, lambda row: row.history if row.params.repetition_penalty != 1.0 else ())
    if not sum(lengths):
        return
    flat, at = scores.view(-1), _on(scores, places)
    penalty = _spread([row.params.repetition_penalty for row in rows], lengths, scores)
    old = flat[at]
    flat[at] = torch.where(old < 0, old * penalty, old / penalty)  # an id that is there twice is written twice the same


def _subtract_counts(scores: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    places, lengths = _places(scores, rows, _counted_outputs)
    if not sum(lengths):
        return
    once, counts = np.unique(places, return_counts=True)
    owners = once // scores.shape[-1]
    frequency = np.array([row.params.frequency_penalty for row in rows], np.float32)[owners]
    presence = np.array([row.params.presence_penalty for row in rows], np.float32)[owners]
    flat, at = scores.view(-1), _on(scores, once)
    for penalty in (frequency * counts.astype(np.float32), presence):
        flat[at] -= torch.from_numpy(penalty).to(scores.device)


def _counted_outputs(row: SampleRow) -> Sequence[int]:
    wanted = row.params.frequency_penalty or row.params.presence_penalty
    return row.history[row.prompt_length :] if wanted else ()


def _places(
    scores: torch.Tensor, rows: Sequence[SampleRow], chosen: Callable[[SampleRow], Sequence[int]]
) -> tuple[Places, list[int]]:
    """Return the places of each row's `chosen` token ids, one row after another, and how many each row has."""
    token_ids = [chosen(row) for row in rows]
    lengths = [len(ids) for ids in token_ids]
    places = np.empty(sum(lengths), np.int64)
    start = 0
    for i, ids in enumerate(token_ids):
        if ids:
            places[start : start + len(ids)] = np.fromiter(ids, np.int64, len(ids)) + i * scores.shape[-1]
            start += len(ids)
    return places, lengths


def _spread(values: Sequence[float], lengths: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.repeat(np.array(values, np.float32), lengths)).to(like.device)


def _on(scores: torch.Tensor, places: Places) -> torch.Tensor:
    return torch.from_numpy(places).to(scores.device)
