"""Token counts of a sequence, updated as it grows, so that penalties need not recount it at each step. Pure."""

from array import array
from collections.abc import Sequence

from wire.types import SamplingParams


def has_penalty(params: SamplingParams) -> bool:
    """Return whether token counts are needed: some penalty is not neutral."""
    return bool(params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty)


class TokenCounts:
    """Mutable, owned by the sequence's owner. `ids` are its distinct tokens, as 64-bit integers.

    `outputs[i]` is how often `ids[i]` occurs in the outputs. A view of either must not outlive the next `update`.
    """

    def __init__(self) -> None:
        self.ids = array("q")
        self.outputs = array("q")
        self._places: dict[int, int] = {}
        self._num_counted = 0

    def update(self, token_ids: Sequence[int], prompt_length: int) -> "TokenCounts":
        """Count the tokens added since the last update; the first `prompt_length` of `token_ids` are the prompt's."""
        for position in range(self._num_counted, len(token_ids)):
            self._count(token_ids[position], is_output=position >= prompt_length)
        self._num_counted = len(token_ids)
        return self

    def fork(self) -> "TokenCounts":
        """Return an independent copy."""
        copy = TokenCounts()
        copy.ids, copy.outputs = self.ids[:], self.outputs[:]
        copy._places, copy._num_counted = self._places.copy(), self._num_counted
        return copy

    def _count(self, token_id: int, *, is_output: bool) -> None:
        place = self._places.setdefault(token_id, len(self.ids))
        if place == len(self.ids):
            self.ids.append(token_id)
            self.outputs.append(0)
        self.outputs[place] += is_output
