"""The encoding of a KV link's messages. Fixed headers, bounded lengths, no objects deserialised from the wire.

    prefix   | magic "PDKV" | version u8 | type u8 | zero u16 | body bytes u32 |
    then the body; after a FRAME's body, on transports that carry it, the payload [tensor][token][head][dim]

Integers are big-endian. A body's length is checked against its type's limit before a byte of it is allocated.
"""

import struct
from dataclasses import astuple

from kvtransfer.link_messages import (
    SIGNALS,
    Abort,
    Ack,
    Commit,
    Frame,
    Held,
    MessageType,
    Nack,
    NumbersMessage,
    Open,
    Read,
    Refuse,
    Renew,
    Signal,
    Taken,
    TicketMessage,
)
from wire.types import PROTOCOL_VERSION

MAGIC = b"PDKV"
PREFIX = struct.Struct("!4sBBHI")
MAX_DESCRIPTION_BYTES = 16 << 20
MAX_FRAME_BYTES = 64 << 20
MAX_FRAME_BLOCKS = 65_536
MAX_TEXT_BYTES = 4_096

_TICKET = struct.Struct("!16sQ")
_FRAME = struct.Struct("!IIIIIIHHQQII")
_COMMIT = struct.Struct("!IQQQ")
_NUMBER = struct.Struct("!I")
_SIGNAL = struct.Struct("!Q")
_NOTHING = struct.Struct("!")
FRAME_HEAD_BYTES = PREFIX.size + _TICKET.size + _FRAME.size  # of a FRAME without block ids


class WireError(Exception):
    """The peer's bytes violate this protocol: the connection is closed and counted."""


class VersionMismatch(WireError):
    """The peer uses another version of this protocol."""


_NUMBERS: dict[MessageType, tuple[type[NumbersMessage], struct.Struct]] = {
    MessageType.OPEN: (Open, struct.Struct("!II")),
    MessageType.NACK: (Nack, _NUMBER),
    MessageType.TAKEN: (Taken, _NUMBER),
    MessageType.ACK: (Ack, _NOTHING),
    MessageType.RENEW: (Renew, _NOTHING),
    MessageType.READ: (Read, _NOTHING),
    MessageType.HELD: (Held, _NOTHING),
}
"""The messages about a ticket that have only numbers; the numbers are packed in the order of the message's fields."""
_TYPES = {message: kind for kind, (message, _) in _NUMBERS.items()}
_MAX_BODY = {
    MessageType.HELLO: 1 << 20,
    MessageType.WELCOME: 4_096,
    MessageType.REFUSE: 2 * MAX_TEXT_BYTES + 8,
    MessageType.FRAME: _TICKET.size + _FRAME.size + 4 * MAX_FRAME_BLOCKS,
    MessageType.COMMIT: _TICKET.size + _COMMIT.size + MAX_DESCRIPTION_BYTES,
    MessageType.ABORT: _TICKET.size + 2 * MAX_TEXT_BYTES + 8,
    MessageType.READY: 0,
    MessageType.CHALLENGE: 1_024,
    MessageType.PROOF: 1_024,
    MessageType.SETUP: 8_192,
    **{kind: _TICKET.size + numbers.size for kind, (_, numbers) in _NUMBERS.items()},
    **dict.fromkeys(SIGNALS, _SIGNAL.size),
}
_KINDS = {int(kind): kind for kind in _MAX_BODY}


def encode(message: TicketMessage | Refuse | Signal) -> bytes:
    """Return prefix and body of `message`."""
    match message:
        case Signal(kind, number):
            return pack(kind, _SIGNAL.pack(number))
        case Refuse(error, reason):
            return pack(MessageType.REFUSE, pack_text(error) + pack_text(reason))
        case Frame():
            kind, tail = MessageType.FRAME, _encode_frame(message)
        case Commit():
            kind, tail = MessageType.COMMIT, _encode_commit(message)
        case Abort():
            kind, tail = MessageType.ABORT, pack_text(message.error) + pack_text(message.reason)
        case _:
            kind = _TYPES[type(message)]
            tail = _NUMBERS[kind][1].pack(*astuple(message)[2:])  # without the ticket's id and epoch
    return pack(kind, _TICKET.pack(bytes.fromhex(message.ticket_id), message.epoch) + tail)


def pack(kind: MessageType, body: bytes) -> bytes:
    """Return `body` preceded by its prefix. Asserts the body's limit, which our own code must respect."""
    assert len(body) <= _MAX_BODY[kind], f"{kind.name} body of {len(body)} bytes"
    return PREFIX.pack(MAGIC, PROTOCOL_VERSION, kind, 0, len(body)) + body


def decode_prefix(prefix: bytes | bytearray | memoryview) -> tuple[MessageType, int]:
    """Return the type and the body's length. Raises WireError, and VersionMismatch with both versions."""
    magic, version, kind, zero, length = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise WireError(f"{bytes(magic)!r} is not a KV link's magic {MAGIC!r}")
    if version != PROTOCOL_VERSION:
        raise VersionMismatch(f"KV protocol version {PROTOCOL_VERSION} here, {version} there")
    known = _KINDS.get(kind)
    if zero != 0 or known is None:
        raise WireError(f"no message has type {kind} and flags {zero}")
    if length > _MAX_BODY[known]:
        raise WireError(f"{known.name} has {length} bytes, but the limit is {_MAX_BODY[known]}")
    return known, length


def decode(kind: MessageType, body: bytes | bytearray) -> TicketMessage | Refuse | Signal:
    """Decode a message's body. Raises WireError."""
    try:
        return _decode(kind, memoryview(body))
    except (struct.error, UnicodeDecodeError) as error:
        raise WireError(f"malformed {kind.name} of {len(body)} bytes: {error}") from error


def _decode(kind: MessageType, body: memoryview) -> TicketMessage | Refuse | Signal:
    if kind is MessageType.REFUSE:
        return Refuse(*unpack_texts(body, 2))
    if kind in SIGNALS:
        return Signal(kind, *_SIGNAL.unpack(body))
    raw_id, epoch = _TICKET.unpack_from(body)
    ticket_id, tail = raw_id.hex(), body[_TICKET.size :]
    match kind:
        case MessageType.FRAME:
            return _decode_frame(ticket_id, epoch, tail)
        case MessageType.COMMIT:
            num_frames, kv_bytes, digest_sum, digest = _COMMIT.unpack_from(tail)
            return Commit(ticket_id, epoch, num_frames, kv_bytes, digest_sum, digest, bytes(tail[_COMMIT.size :]))
        case MessageType.ABORT:
            return Abort(ticket_id, epoch, *unpack_texts(tail, 2))
    if kind not in _NUMBERS:
        raise WireError(f"{kind.name} of {len(body)} bytes is not a message about a ticket")
    message, numbers = _NUMBERS[kind]
    return message(ticket_id, epoch, *numbers.unpack(tail))


def _encode_frame(frame: Frame) -> bytes:
    head = _FRAME.pack(
        frame.number, frame.layer, frame.tensor, frame.num_tensors, frame.start, frame.end, frame.head_start,
        frame.head_end, frame.num_bytes, frame.digest, frame.window, len(frame.block_ids),
    )  # fmt: skip
    return head + struct.pack(f"!{len(frame.block_ids)}I", *frame.block_ids)


def _decode_frame(ticket_id: str, epoch: int, tail: memoryview) -> Frame:
    head = _FRAME.unpack_from(tail)
    number, layer, tensor, num_tensors, start, end, head_start, head_end, num_bytes, digest, window, num_blocks = head
    if num_blocks > MAX_FRAME_BLOCKS:
        raise WireError(f"a FRAME names {num_blocks} blocks, but the limit is {MAX_FRAME_BLOCKS}")
    block_ids = struct.unpack(f"!{num_blocks}I", tail[_FRAME.size :])
    return Frame(
        ticket_id, epoch, number, layer, tensor, start, end, head_start, head_end, num_bytes, digest, block_ids, window,
        num_tensors,
    )  # fmt: skip


def _encode_commit(commit: Commit) -> bytes:
    return (
        _COMMIT.pack(commit.num_frames, commit.kv_bytes, commit.digest_sum, commit.description_digest)
        + commit.description
    )


def pack_text(text: str) -> bytes:
    """Return `text` as length and UTF-8, truncated at the limit."""
    data = text.encode("utf-8", "replace")[:MAX_TEXT_BYTES].decode("utf-8", "ignore").encode()
    return _NUMBER.pack(len(data)) + data


def unpack_texts(body: memoryview, count: int) -> list[str]:
    """Return the `count` strings that make up `body`. Raises WireError."""
    texts, offset = [], 0
    for _ in range(count):
        (length,) = _NUMBER.unpack_from(body, offset)
        offset += _NUMBER.size
        if length > MAX_TEXT_BYTES or offset + length > len(body):
            raise WireError(
                f"a string has {length} bytes, but {len(body) - offset} are left, and the limit is {MAX_TEXT_BYTES}"
            )
        texts.append(str(body[offset : offset + length], "utf-8"))
        offset += length
    if offset != len(body):
        raise WireError(f"the last string ends at byte {offset} of {len(body)}")
    return texts
