"""What a frame must be to belong to a ticket: checked before a byte of it is moved. Pure."""

from collections.abc import Sequence

from kvtransfer.frame import MAX_FRAME_BYTES, Frame
from wire.errors import HandoffFailed
from wire.kv_layout import KvTensor


def check_frame(frame: Frame, tensors: Sequence[KvTensor], *, first_token: int, num_tokens: int) -> None:
    """Raise HandoffFailed, with both values, for a frame that is not of these tensors, tokens, heads and bytes."""
    if frame.tensor >= len(tensors) or tensors[frame.tensor].layer != frame.layer:
        raise HandoffFailed(f"{in_words(frame)} is none of the {len(tensors)} KV tensors here")
    tensor = tensors[frame.tensor]
    if not first_token <= frame.start < frame.end <= num_tokens:
        raise HandoffFailed(f"{in_words(frame)} is outside the tokens [{first_token}, {num_tokens}) wanted")
    if (frame.head_start, frame.head_end) != (0, tensor.heads):
        raise HandoffFailed(f"heads [{frame.head_start}, {frame.head_end}) sent, [0, {tensor.heads}) are wanted")
    wanted_bytes = (frame.end - frame.start) * tensor.token_bytes
    if frame.num_bytes != wanted_bytes or wanted_bytes > MAX_FRAME_BYTES:
        raise HandoffFailed(
            f"{in_words(frame)} of {frame.num_bytes} bytes, {wanted_bytes} are wanted, the limit is {MAX_FRAME_BYTES}"
        )


def same_place(one: Frame, other: Frame) -> bool:
    """Tell whether two frames name the same slots."""
    return _place(one) == _place(other)


def in_words(frame: Frame) -> str:
    """Name a frame for an error message."""
    return f"layer {frame.layer} tensor {frame.tensor} tokens [{frame.start}, {frame.end})"


def _place(frame: Frame) -> tuple[int, ...]:
    return frame.tensor, frame.start, frame.end, frame.head_start, frame.head_end, frame.num_bytes
