"""Choose the likeliest sequences of a prompt where more are generated than the client gets."""

import dataclasses
import math

from scheduler.request import GenerationRequest
from scheduler.text.pieces import TextPiece


def ranked(request: GenerationRequest) -> GenerationRequest:
    """Return the request with what choosing needs: where best_of is above n, each token's log probability."""
    params = request.params
    if params.num_sequences == params.n or params.logprobs is not None:
        return request
    return dataclasses.replace(request, params=dataclasses.replace(params, logprobs=0))


class BestOf:
    """The pieces of one prompt's `num_sequences`, of which the `n` likeliest leave once all have ended.

    They leave likeliest first, by the sum of log probabilities (of two alike the one of lower number), with indices
    from `first_index` on. Where every sequence is wanted, pieces leave as they come and as they are.
    """

    def __init__(self, n: int, num_sequences: int, *, first_index: int) -> None:
        self._n = n
        self._first_index = first_index
        self._all_wanted = n == num_sequences
        self._held: list[list[TextPiece]] = [[] for _ in range(num_sequences)]

    def add(self, sequence: int, piece: TextPiece) -> list[TextPiece]:
        """Take the next piece of `sequence`; return those that may leave now."""
        if self._all_wanted:
            return [piece]
        self._held[sequence].append(piece)
        if not all(held and held[-1].finish_reason is not None for held in self._held):
            return []
        likeliest = sorted(self._held, key=lambda held: -_likelihood(held[-1]))[: self._n]
        return [
            dataclasses.replace(piece, index=self._first_index + place)
            for place, held in enumerate(likeliest)
            for piece in held
        ]


def _likelihood(last: TextPiece) -> float:
    return -math.inf if last.cumulative_logprob is None else last.cumulative_logprob
