"""Several commands, or several events, in one message: a message costs more than most of what it says."""

from collections.abc import Sequence
from typing import TypeVar

from wire import cluster_pb2 as pb

PACK_BYTES = 256 * 2**10
"""Nothing more is added to a message of so many bytes: what comes first is not kept waiting for what is large."""

_Message = TypeVar("_Message", pb.CommandMessage, pb.EventMessage)


def pack(messages: Sequence[_Message]) -> list[_Message]:
    """Return the same in as few messages as may be, in order: the later ones stand in `more` of the first."""
    if len(messages) < 2:
        return list(messages)
    packed: list[_Message] = []
    size = PACK_BYTES
    for message in messages:
        num_bytes = message.ByteSize()
        if size + num_bytes > PACK_BYTES:
            packed.append(message)
            size = num_bytes
        else:
            packed[-1].more.append(message)
            size += num_bytes
    return packed
