"""Log probabilities of many positions in six flat lists, without an object per entry for the garbage collector."""

from collections.abc import Iterable, Sequence
from typing import overload

from pdserve.offline.outputs import Logprob

Position = dict[int, Logprob]


class FlatLogprobs(Sequence[Position]):
    """Reads as a list of {token id: Logprob}, created on each access; a position without entries is {}.

    The entries of position i are `start_indices[i]` to `end_indices[i]` of the other four lists.
    """

    def __init__(self, positions: Iterable[Position | None] = ()) -> None:
        self.start_indices: list[int] = []
        self.end_indices: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.ranks: list[int | None] = []
        self.decoded_tokens: list[str | None] = []
        self.extend(positions)

    def append(self, position: Position | None) -> None:
        """Add the entries of the next position."""
        self.start_indices.append(len(self.token_ids))
        for token_id, entry in (position or {}).items():
            self.token_ids.append(token_id)
            self.logprobs.append(entry.logprob)
            self.ranks.append(entry.rank)
            self.decoded_tokens.append(entry.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def extend(self, positions: Iterable[Position | None]) -> None:
        """Add one position after the other."""
        for position in positions:
            self.append(position)

    def __repr__(self) -> str:
        return f"FlatLogprobs({len(self)} positions, {len(self.token_ids)} entries)"

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> Position: ...
    @overload
    def __getitem__(self, index: slice) -> "FlatLogprobs": ...
    def __getitem__(self, index: int | slice) -> "Position | FlatLogprobs":
        """Return one position, or a slice as a FlatLogprobs."""
        if isinstance(index, slice):
            return FlatLogprobs(self[at] for at in range(*index.indices(len(self))))
        return {
            self.token_ids[at]: Logprob(self.logprobs[at], self.ranks[at], self.decoded_tokens[at])
            for at in range(self.start_indices[index], self.end_indices[index])
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == [one or {} for one in other]
