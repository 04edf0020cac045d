"""What a frame must be to belong to a ticket: checked before a byte of it is moved. Pure."""

import struct
from dataclasses import dataclass

from kvtransfer.digest import digest_of
from kvtransfer.frame import MAX_FRAME_BYTES, Frame
from wire.errors import HandoffFailed
from wire.kv_layout import Heads, KvTensor

_SEAL = struct.Struct("!IIIIIHHQ")


@dataclass(frozen=True, slots=True)
class Terms:
    """What one rank of P owes one rank of D: tokens [first_token, num_tokens) of these heads of each tensor.

    `tensors` are the whole model's; a tensor of which it owes nothing has an empty range of heads.
    """

    tensors: tuple[KvTensor, ...]
    heads: tuple[Heads, ...]
    first_token: int
    num_tokens: int

    @property
    def tensor_tokens(self) -> int:
        """Tokens owed, over all tensors."""
        return sum(start < end for start, end in self.heads) * (self.num_tokens - self.first_token)

    def num_bytes(self, tensor: int, num_tokens: int) -> int:
        """Bytes of the heads owed of one tensor."""
        start, end = self.heads[tensor]
        return num_tokens * (end - start) * self.tensors[tensor].head_bytes


def check_frame(frame: Frame, terms: Terms) -> None:
    """Raise HandoffFailed, with both values, for a frame that is not of these tensors, tokens, heads and bytes."""
    tensors, first_token, num_tokens = terms.tensors, terms.first_token, terms.num_tokens
    if frame.tensor >= len(tensors) or tensors[frame.tensor].layer != frame.layer:
        raise HandoffFailed(f"{in_words(frame)} is none of the {len(tensors)} KV tensors here")
    if not first_token <= frame.start < frame.end <= num_tokens:
        raise HandoffFailed(f"{in_words(frame)} is outside the tokens [{first_token}, {num_tokens}) wanted")
    if (frame.head_start, frame.head_end) != terms.heads[frame.tensor]:
        wanted = terms.heads[frame.tensor]
        raise HandoffFailed(
            f"{in_words(frame)}: heads [{frame.head_start}, {frame.head_end}) sent, {wanted} are wanted"
        )
    wanted_bytes = terms.num_bytes(frame.tensor, frame.end - frame.start)
    if frame.num_bytes != wanted_bytes or wanted_bytes > MAX_FRAME_BYTES:
        raise HandoffFailed(
            f"{in_words(frame)} of {frame.num_bytes} bytes, {wanted_bytes} are wanted, the limit is {MAX_FRAME_BYTES}"
        )


def seal_of(frame: Frame) -> int:
    """Return what a frame adds to its commit's sum: 64 bits over its place and its digest, so neither is exchanged."""
    return digest_of([
        _SEAL.pack(
            frame.number, frame.layer, frame.tensor, frame.start, frame.end, frame.head_start, frame.head_end,
            frame.digest,
        )
    ])  # fmt: skip


def same_place(one: Frame, other: Frame) -> bool:
    """Tell whether two frames name the same slots."""
    return _place(one) == _place(other)


def in_words(frame: Frame) -> str:
    """Name a frame for an error message."""
    return f"layer {frame.layer} tensor {frame.tensor} tokens [{frame.start}, {frame.end})"


def _place(frame: Frame) -> tuple[int, ...]:
    return frame.tensor, frame.start, frame.end, frame.head_start, frame.head_end, frame.num_bytes
