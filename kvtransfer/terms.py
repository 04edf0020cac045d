"""Conditions for a frame to belong to a ticket, checked before a byte of it is moved. Pure."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kvtransfer.digest import digest_of
from kvtransfer.link_codec import MAX_FRAME_BYTES
from kvtransfer.link_messages import Frame
from wire.errors import HandoffFailed
from wire.kv_layout import Heads, KvTensor

_SEAL = struct.Struct("!IIIIIIHHQ")


class RankHeads:
    """The heads of each tensor that one rank of P sends to one rank of D. Immutable; made once for all tickets.

    `tensors` are the whole model's; a tensor that is not sent has an empty range of heads, and 0 `token_bytes`.
    """

    __slots__ = ("heads", "num_tensors", "tensors", "token_bytes")

    def __init__(self, tensors: Sequence[KvTensor], heads: Sequence[Heads]) -> None:
        self.tensors, self.heads = tuple(tensors), tuple(heads)
        self.token_bytes = tuple(
            (those.end - those.start) * tensor.head_bytes for tensor, those in zip(tensors, heads, strict=True)
        )
        self.num_tensors = sum(num_bytes > 0 for num_bytes in self.token_bytes)


@dataclass(frozen=True, slots=True)
class Terms:
    """What one rank of P must send to one rank of D for one ticket: its part of tokens [first_token, num_tokens)."""

    part: RankHeads
    first_token: int
    num_tokens: int

    @property
    def tensor_tokens(self) -> int:
        """Number of tokens to send, over all tensors."""
        return self.part.num_tensors * (self.num_tokens - self.first_token)


def check_frame(frame: Frame, terms: Terms) -> None:
    """Raise HandoffFailed, with both values, for a frame with other tensors, tokens, heads or bytes."""
    part, tensors, first_token, num_tokens = terms.part, terms.part.tensors, terms.first_token, terms.num_tokens
    last = frame.tensor + frame.num_tensors
    if not frame.tensor < last <= len(tensors) or tensors[frame.tensor].layer != frame.layer:
        raise HandoffFailed(f"{describe_frame(frame)} is not among the {len(tensors)} KV tensors here")
    if not first_token <= frame.start < frame.end <= num_tokens:
        raise HandoffFailed(f"{describe_frame(frame)} is outside the expected tokens [{first_token}, {num_tokens})")
    if len(frame.block_ids) > frame.end - frame.start + 1:  # a block holds at least one token
        raise HandoffFailed(
            f"{describe_frame(frame)} names {len(frame.block_ids)} blocks, "
            f"but the limit is {frame.end - frame.start + 1}"
        )
    for wanted in part.heads[frame.tensor : last]:
        if frame.head_start != wanted.start or frame.head_end != wanted.end:
            raise HandoffFailed(
                f"{describe_frame(frame)}: heads [{frame.head_start}, {frame.head_end}) sent, {wanted} expected"
            )
    wanted_bytes = (frame.end - frame.start) * sum(part.token_bytes[frame.tensor : last])
    if frame.num_bytes != wanted_bytes or wanted_bytes > MAX_FRAME_BYTES:
        raise HandoffFailed(
            f"{describe_frame(frame)} has {frame.num_bytes} bytes, expected {wanted_bytes} (limit {MAX_FRAME_BYTES})"
        )


def seal_of(frame: Frame) -> int:
    """Return a frame's term in the sum of its commit: 64 bits that bind its digest to its place."""
    return digest_of([
        _SEAL.pack(
            frame.number, frame.layer, frame.tensor, frame.num_tensors, frame.start, frame.end, frame.head_start,
            frame.head_end, frame.digest,
        )
    ])  # fmt: skip


def same_place(one: Frame, other: Frame) -> bool:
    """Return whether two frames name the same slots."""
    return _place(one) == _place(other)


def describe_frame(frame: Frame) -> str:
    """Describe a frame for an error message."""
    tensors = f"tensor {frame.tensor}"
    if frame.num_tensors != 1:
        tensors = f"tensors [{frame.tensor}, {frame.tensor + frame.num_tensors})"
    return f"layer {frame.layer} {tensors} tokens [{frame.start}, {frame.end})"


def _place(frame: Frame) -> tuple[int, ...]:
    return (
        frame.tensor, frame.num_tensors, frame.start, frame.end, frame.head_start, frame.head_end, frame.num_bytes,
    )  # fmt: skip
