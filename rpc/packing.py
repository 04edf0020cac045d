"""Pack several commands or events into one message: the overhead of a message exceeds most payloads."""

from collections.abc import Sequence
from typing import TypeVar

from wire import cluster_pb2 as pb

PACK_BYTES = 256 * 2**10
"""Nothing is added to a message that would then exceed this size: large entries must not delay earlier ones."""

_Message = TypeVar("_Message", pb.CommandMessage, pb.EventMessage)


def pack(messages: Sequence[_Message]) -> list[_Message]:
    """Return the messages packed into as few as possible, in order: `more` of a packed message has those after it."""
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
