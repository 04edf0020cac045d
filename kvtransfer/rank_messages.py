"""The messages between rank 0 and a rank that transfers its own KV, over a Unix socket (processes/rank_channel.py).

about a ticket | length of its id: 16 bits | id | 64-bit integers, text, or JSON, by kind; little-endian
about a rank   | JSON

No message can execute code. Senders of each: far_rank.py (rank 0's end), rank_transfer.py (the rank's).
"""

import dataclasses
import struct
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from kvtransfer.receiver_counts import ReceiverCounts
from kvtransfer.totals import PeerProcess
from processes.rank_payloads import little_endian
from wire.load import LinkStatus

_LENGTH = struct.Struct("<H")


class RankMessage(IntEnum):
    """Kinds of messages: the first two rows are sent by rank 0 (sending, receiving), the last two by the rank."""

    BEGIN, PUT, COMMIT, ABORT = range(1, 5)
    RESERVE, SETTLE, OTHERS, ADDRESSES, CLOSE, CAUGHT_UP = range(11, 17)
    ACKED, FAILED, COUNTERS = range(21, 24)
    HERE, LACKING, READY, ENDED, RELEASED, PROGRESS, CLOSED, CATCH_UP = range(31, 39)


@dataclass(frozen=True, slots=True)
class RankCounters:
    """A rank's counters: its links, what it sent and what it received."""

    links: tuple[tuple[PeerProcess, LinkStatus], ...] = ()
    bytes_sent: int = 0
    frames_resent: int = 0
    received: ReceiverCounts = dataclasses.field(default_factory=ReceiverCounts)


def pack_numbers(ticket_id: str, *numbers: int, blocks: Iterable[int] = ()) -> bytes:
    """Return a ticket's id and integers."""
    return _ticket_head(ticket_id) + little_endian(array("q", (*numbers, *blocks))).tobytes()


def unpack_numbers(payload: bytes, minimum: int = 0) -> tuple[str, list[int]]:
    """Decode the output of `pack_numbers`. Raises ValueError for other bytes, and for fewer than `minimum` integers."""
    ticket_id, rest = unpack_bytes(payload)
    values = array("q")
    values.frombytes(rest)  # ValueError for a length that is not a multiple of 8
    if len(values) < minimum:
        raise ValueError(f"received {len(values)} integers, expected at least {minimum}")
    return ticket_id, little_endian(values).tolist()


def pack_bytes(ticket_id: str, rest: bytes) -> bytes:
    """Return a ticket's id and bytes."""
    return _ticket_head(ticket_id) + rest


def unpack_bytes(payload: bytes) -> tuple[str, bytes]:
    """Decode the output of `pack_bytes`. Raises ValueError for other bytes."""
    if len(payload) < _LENGTH.size:
        raise ValueError(f"a ticket's message of {len(payload)} bytes is too short")
    end = _LENGTH.size + _LENGTH.unpack_from(payload)[0]
    if end > len(payload):
        raise ValueError(f"received {len(payload)} bytes, expected at least {end}")
    return payload[_LENGTH.size : end].decode(), payload[end:]


def _ticket_head(ticket_id: str) -> bytes:
    name = ticket_id.encode()
    return _LENGTH.pack(len(name)) + name
