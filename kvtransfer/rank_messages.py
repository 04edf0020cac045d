"""The messages between rank 0 and a rank that transfers its own KV, over a Unix socket (processes/rank_channel.py).

about a ticket | length of its id: 16 bits | id | 64-bit integers, text, or JSON, by kind; little-endian
about a rank   | JSON

No message can execute code. Senders of each: far_rank.py (rank 0's end), rank_half.py (the rank's).
"""

import dataclasses
import json
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from kvtransfer.interface import SendStats
from kvtransfer.ticket_table import ReceiverCounts
from kvtransfer.totals import Life
from processes.rank_payloads import read_object
from wire.types import KvEndpoint, LinkStatus, Ticket

_LENGTH = struct.Struct("<H")


class RankMessage(IntEnum):
    """Kinds of messages: the first two rows are sent by rank 0 (sending, receiving), the last two by the rank."""

    BEGIN, PUT, COMMIT, ABORT = range(1, 5)
    RESERVE, SETTLE, OTHERS, ADDRESSES, CLOSE, CAUGHT_UP = range(11, 17)
    ACKED, FAILED, FIGURES = range(21, 24)
    HERE, LACKING, READY, ENDED, RELEASED, PROGRESS, CLOSED, CATCH_UP = range(31, 39)


@dataclass(frozen=True, slots=True)
class HalfSettings:
    """Settings with which a rank sends and receives its part: of its instance, its links and its trusted peers.

    `secret` is the cluster secret's bytes in hex digits. `addresses` and `loopback` are those of security/trust.Trust.
    """

    instance_id: str
    epoch: int
    host: str
    source: str | None
    transports: tuple[str, ...]
    lease_s: float
    port_range: tuple[int, int] | None
    digests: bool
    links_per_peer: int
    secret: str | None = dataclasses.field(repr=False, default=None)
    addresses: tuple[str, ...] = ()
    loopback: bool = True

    def to_json(self) -> bytes:
        """Return the encoding that `from_json` reads."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_json(cls, payload: bytes) -> "HalfSettings":
        """Decode the output of `to_json`. Raises ValueError for other bytes."""
        values = read_object(payload, cls)
        ports = values["port_range"]
        values["port_range"] = None if ports is None else (int(ports[0]), int(ports[1]))
        return cls(**{**values, "transports": tuple(values["transports"]), "addresses": tuple(values["addresses"])})


@dataclass(frozen=True, slots=True)
class RankCounters:
    """A rank's counters: its links, what it sent and what it received."""

    links: tuple[tuple[Life, LinkStatus], ...] = ()
    bytes_sent: int = 0
    frames_resent: int = 0
    received: ReceiverCounts = dataclasses.field(default_factory=ReceiverCounts)

    def to_json(self) -> bytes:
        """Return the encoding that `from_json` reads."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_json(cls, payload: bytes) -> "RankCounters":
        """Decode the output of `to_json`. Raises ValueError for other bytes."""
        values = read_object(payload, cls)
        links = tuple(
            ((str(life[0]), int(life[1])), LinkStatus(**{**one, "passed_over": tuple(one["passed_over"])}))
            for life, one in values["links"]
        )
        received = ReceiverCounts(**values["received"])
        return cls(links, int(values["bytes_sent"]), int(values["frames_resent"]), received)


def pack_numbers(ticket_id: str, *numbers: int, blocks: Iterable[int] = ()) -> bytes:
    """Return a ticket's id and integers."""
    return _head(ticket_id) + _little_endian(array("q", (*numbers, *blocks))).tobytes()


def unpack_numbers(payload: bytes, least: int = 0) -> tuple[str, list[int]]:
    """Decode the output of `pack_numbers`. Raises ValueError for other bytes, and for fewer than `least` integers."""
    ticket_id, rest = unpack_bytes(payload)
    values = array("q")
    values.frombytes(rest)  # ValueError for a length that is not a multiple of 8
    if len(values) < least:
        raise ValueError(f"received {len(values)} integers, expected at least {least}")
    return ticket_id, _little_endian(values).tolist()


def pack_bytes(ticket_id: str, rest: bytes) -> bytes:
    """Return a ticket's id and bytes."""
    return _head(ticket_id) + rest


def unpack_bytes(payload: bytes) -> tuple[str, bytes]:
    """Decode the output of `pack_bytes`. Raises ValueError for other bytes."""
    if len(payload) < _LENGTH.size:
        raise ValueError(f"{len(payload)} bytes are too short for a message about a ticket")
    end = _LENGTH.size + _LENGTH.unpack_from(payload)[0]
    if end > len(payload):
        raise ValueError(f"received {len(payload)} bytes, expected at least {end}")
    return payload[_LENGTH.size : end].decode(), payload[end:]


def pack_ticket(ticket: Ticket) -> bytes:
    """Return the encoding that `unpack_ticket` reads."""
    return json.dumps(dataclasses.asdict(ticket)).encode()


def unpack_ticket(payload: bytes) -> Ticket:
    """Decode the output of `pack_ticket`. Raises ValueError for other bytes."""
    values = read_object(payload, Ticket)
    return Ticket(**{**values, "endpoints": tuple(KvEndpoint(**one) for one in values["endpoints"])})


def pack_stats(stats: SendStats) -> bytes:
    """Return the encoding that `unpack_stats` reads."""
    return json.dumps(dataclasses.asdict(stats)).encode()


def unpack_stats(payload: bytes) -> SendStats:
    """Decode the output of `pack_stats`. Raises ValueError for other bytes."""
    return SendStats(**read_object(payload, SendStats))


def pack_endpoints(endpoints: Sequence[KvEndpoint]) -> bytes:
    """Return the encoding that `unpack_endpoints` reads."""
    return json.dumps([dataclasses.asdict(one) for one in endpoints]).encode()


def unpack_endpoints(payload: bytes) -> tuple[KvEndpoint, ...]:
    """Decode the output of `pack_endpoints`: the endpoints that a rank listens at."""
    return tuple(KvEndpoint(**one) for one in json.loads(payload))


def _head(ticket_id: str) -> bytes:
    name = ticket_id.encode()
    return _LENGTH.pack(len(name)) + name


def _little_endian(values: "array[int]") -> "array[int]":
    if sys.byteorder == "big":
        values.byteswap()
    return values
