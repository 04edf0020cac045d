"""The tokens received of each tensor: sorted token ranges, each with one bit per tensor. Pure."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple


def mask_of(tensor: int, num_tensors: int = 1) -> int:
    """Return the bits of `num_tensors` tensors, starting at `tensor`."""
    return ((1 << num_tensors) - 1) << tensor


class _Piece(NamedTuple):
    """Tokens [start, end), received for the tensors whose bits are in `mask`."""

    start: int
    end: int
    mask: int


class Coverage:
    """Owner of the pieces of one ticket. Equal neighbours are joined, so in-order chunks stay one piece."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._masks: list[int] = []

    def add(self, start: int, end: int, mask: int) -> bool:
        """Add [start, end) of the tensors in `mask`; if any of it was there already, return False and add nothing."""
        low, high = bisect_right(self._ends, start), bisect_left(self._starts, end)
        touched = list(self._pieces_between(low, high))
        if any(piece.mask & mask for piece in touched):
            return False
        low, high = max(0, low - 1), high + 1  # include the neighbours: they may be joined
        before, after = self._pieces_between(low, high - 1 - len(touched)), self._pieces_between(high - 1, high)
        joined = _join_adjacent([*before, *_with_mask(touched, start, end, mask), *after])
        self._starts[low:high] = [piece.start for piece in joined]
        self._ends[low:high] = [piece.end for piece in joined]
        self._masks[low:high] = [piece.mask for piece in joined]
        return True

    def missing(self, start: int, end: int, mask: int) -> list[tuple[int, int]]:
        """Return the parts of [start, end) not yet added for all the tensors in `mask`, ascending."""
        gaps: list[tuple[int, int]] = []
        at = start
        for piece in self._pieces_between(bisect_right(self._ends, start), bisect_left(self._starts, end)):
            if piece.mask & mask == mask:
                if at < piece.start:
                    gaps.append((at, piece.start))
                at = piece.end
        return [*gaps, (at, end)] if at < end else gaps

    def _pieces_between(self, low: int, high: int) -> Iterator[_Piece]:
        return map(_Piece, self._starts[low:high], self._ends[low:high], self._masks[low:high])


def _with_mask(touched: Iterable[_Piece], start: int, end: int, mask: int) -> Iterator[_Piece]:
    """Yield the touched pieces and the gaps between them, with `mask` added within [start, end)."""
    at = start
    for piece in touched:
        if piece.start < start:
            yield piece._replace(end=start)
        if at < piece.start:
            yield _Piece(at, piece.start, mask)
        inner = max(piece.start, start)
        at = min(piece.end, end)
        yield _Piece(inner, at, piece.mask | mask)
        if at < piece.end:
            yield piece._replace(start=at)
    if at < end:
        yield _Piece(at, end, mask)


def _join_adjacent(pieces: Iterable[_Piece]) -> list[_Piece]:
    kept: list[_Piece] = []
    for piece in pieces:
        if kept and kept[-1].end == piece.start and kept[-1].mask == piece.mask:
            kept[-1] = kept[-1]._replace(end=piece.end)
        else:
            kept.append(piece)
    return kept
