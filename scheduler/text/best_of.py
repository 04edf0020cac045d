"""Choose the most likely sequences of a prompt if more are generated than the client gets."""

import dataclasses
import math

from scheduler.request import GenerationRequest
from scheduler.text.pieces import TextPiece


def ranked(request: GenerationRequest) -> GenerationRequest:
    """Return the request with log probabilities enabled if best_of exceeds n."""
    params = request.params
    if params.num_sequences == params.n or params.logprobs is not None:
        return request
    return dataclasses.replace(request, params=dataclasses.replace(params, logprobs=0))


class BestOf:
    """The pieces of one prompt's `num_sequences`; the `n` most likely are released once all have finished.

    They are released most likely first, by the sum of log probabilities (ties by lower number), with indices from
    `first_index` on.
    """

    def __init__(self, n: int, num_sequences: int, *, first_index: int) -> None:
        self._n = n
        self._first_index = first_index
        self._held: list[list[TextPiece]] = [[] for _ in range(num_sequences)]

    def add(self, sequence: int, piece: TextPiece) -> list[TextPiece]:
        """Add the next piece of `sequence`; return those that can be released now."""
        self._held[sequence].append(piece)
        if not all(held and held[-1].finish_reason is not None for held in self._held):
            return []
        likeliest = sorted(self._held, key=lambda held: -_score(held[-1]))[: self._n]
        return [
            dataclasses.replace(piece, index=self._first_index + place)
            for place, held in enumerate(likeliest)
            for piece in held
        ]


def _score(last: TextPiece) -> float:
    return -math.inf if last.cumulative_logprob is None else last.cumulative_logprob
