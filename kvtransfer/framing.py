"""Split a put into frames: as few as the limits allow, each with neighbouring tensors or part of one tensor. Pure.

    layers 0-3 of tokens [0, 512) | 0 k 0 v 1 k 1 v 2 k | 2 v 3 k 3 v |       small tensors share a frame
    layer 0 of tokens [0, 65536)  | 0 k [0, 32768) | 0 k [32768, 65536) | 0 v [0, 32768) | ...

A frame costs both sides some tens of microseconds regardless of its size, so queued layers share few frames.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvtransfer.terms import RankHeads
from kvtransfer.transport_interface import FRAME_BYTES

FRAME_TOKENS = 32_768


class FrameRange(NamedTuple):
    """The content of one frame: tokens [start, end) of `num_tensors` tensors, starting at `tensor`."""

    tensor: int
    num_tensors: int
    start: int
    end: int


def cut_frames(
    part: RankHeads, wanted: Iterable[tuple[int, Sequence[tuple[int, int]]]], max_bytes: int,
    shared_bytes: int = FRAME_BYTES,
) -> Iterator[FrameRange]:  # fmt: skip
    """Yield the frames for `wanted`: pairs of a tensor of `part` and its token ranges, with tensors ascending.

    Neighbouring tensors with the same heads and ranges share a frame, up to `shared_bytes`; a single tensor is split
    at `max_bytes`.
    """
    shared_bytes, group = min(max_bytes, shared_bytes), _Group(0, ())
    for tensor, ranges in wanted:
        if not ranges:
            continue
        if not group.accepts(part, tensor, ranges, shared_bytes):
            yield from group.frames(part, max_bytes)
            group = _Group(tensor, ranges)
        group.add(part.token_bytes[tensor])
    yield from group.frames(part, max_bytes)


class _Group:
    """Neighbouring tensors whose equal ranges are sent together."""

    def __init__(self, first: int, ranges: Sequence[tuple[int, int]]) -> None:
        self._first, self._ranges, self._num_tensors, self._token_bytes = first, ranges, 0, 0
        self._max_tokens = max((end - start for start, end in ranges), default=0)

    def accepts(self, part: RankHeads, tensor: int, ranges: Sequence[tuple[int, int]], max_bytes: int) -> bool:
        return (
            tensor == self._first + self._num_tensors
            and ranges == self._ranges
            and part.heads[tensor] == part.heads[self._first]
            and self._max_tokens <= FRAME_TOKENS
            and (self._token_bytes + part.token_bytes[tensor]) * self._max_tokens <= max_bytes
        )

    def add(self, token_bytes: int) -> None:
        self._num_tensors += 1
        self._token_bytes += token_bytes

    def frames(self, part: RankHeads, max_bytes: int) -> Iterator[FrameRange]:
        max_tokens = FRAME_TOKENS
        if self._num_tensors == 1:
            max_tokens = max(1, min(max_tokens, max_bytes // part.token_bytes[self._first]))
        for range_start, range_end in self._ranges:
            for start in range(range_start, range_end, max_tokens):
                yield FrameRange(self._first, self._num_tensors, start, min(range_end, start + max_tokens))
