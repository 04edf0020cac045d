"""The messages of a KV link and their encoding. Fixed headers, bounded lengths, no objects deserialised from the wire.

    prefix   | magic "PDKV" | version u8 | type u8 | zero u16 | body bytes u32 |
    then the body; after a FRAME's body, on transports that carry it, the payload [tensor][token][head][dim]

    sender   HELLO ->           PROOF ->                   (set-up)     OPEN, FRAME ..., COMMIT, RENEW, HELD, ABORT ->
    receiver       <- CHALLENGE       <- WELCOME | REFUSE  (set-up)  <- READY | REFUSE  <- TAKEN, NACK, READ, ACK, ABORT

    to measure a link    sender PING ->, PROBE FRAME ->    receiver <- PONG, <- PROBED

A FRAME right after PROBE belongs to no ticket: its payload is moved like any other, into memory that nobody reads.

The set-up is specific to the transport (with SETUP messages on some).

Integers are big-endian. A body's length is checked against its type's limit before a byte of it is allocated.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

from wire.types import PROTOCOL_VERSION

MAGIC = b"PDKV"
PREFIX = struct.Struct("!4sBBHI")
MAX_DESCRIPTION_BYTES = 16 << 20
MAX_FRAME_BYTES = 64 << 20
MAX_FRAME_BLOCKS = 65_536
MAX_TEXT_BYTES = 4_096

_TICKET = struct.Struct("!16sQ")
_OPEN = struct.Struct("!II")
_FRAME = struct.Struct("!IIIIIIHHQQII")
_COMMIT = struct.Struct("!IQQQ")
_NUMBER = struct.Struct("!I")
_SIGNAL = struct.Struct("!Q")
FRAME_HEAD_BYTES = PREFIX.size + _TICKET.size + _FRAME.size  # of a FRAME without block ids


class WireError(Exception):
    """The peer's bytes violate this protocol: the connection is closed and counted."""


class VersionMismatch(WireError):
    """The peer uses another version of this protocol."""


class MessageType(IntEnum):
    """The type byte."""

    HELLO = 1
    WELCOME = 2
    REFUSE = 3
    OPEN = 4
    FRAME = 5
    NACK = 6
    COMMIT = 7
    ACK = 8
    ABORT = 9
    RENEW = 10
    READY = 11
    TAKEN = 12
    CHALLENGE = 13
    PROOF = 14
    PING = 15
    PONG = 16
    PROBE = 17
    PROBED = 18
    SETUP = 19
    READ = 20
    HELD = 21


_MAX_BODY = {
    MessageType.HELLO: 1 << 20,
    MessageType.WELCOME: 4_096,
    MessageType.REFUSE: 2 * MAX_TEXT_BYTES + 8,
    MessageType.OPEN: _TICKET.size + _OPEN.size,
    MessageType.FRAME: _TICKET.size + _FRAME.size + 4 * MAX_FRAME_BLOCKS,
    MessageType.NACK: _TICKET.size + _NUMBER.size,
    MessageType.COMMIT: _TICKET.size + _COMMIT.size + MAX_DESCRIPTION_BYTES,
    MessageType.ACK: _TICKET.size,
    MessageType.ABORT: _TICKET.size + 2 * MAX_TEXT_BYTES + 8,
    MessageType.RENEW: _TICKET.size,
    MessageType.READY: 0,
    MessageType.TAKEN: _TICKET.size + _NUMBER.size,
    MessageType.CHALLENGE: 1_024,
    MessageType.PROOF: 1_024,
    MessageType.SETUP: 8_192,
    MessageType.READ: _TICKET.size,
    MessageType.HELD: _TICKET.size,
    MessageType.PING: _SIGNAL.size,
    MessageType.PONG: _SIGNAL.size,
    MessageType.PROBE: _SIGNAL.size,
    MessageType.PROBED: _SIGNAL.size,
}
_KINDS = {int(kind): kind for kind in _MAX_BODY}


@dataclass(frozen=True, slots=True)
class Open:
    """The sender is about to send this ticket's frames; it states the token range that it takes to be requested."""

    ticket_id: str
    epoch: int
    num_tokens: int
    first_token: int


@dataclass(frozen=True, slots=True)
class Frame:
    """Tokens [start, end) of `num_tensors` KV tensors; `tensor` is the first one's layout index, `layer` its layer.

    All have the same heads. `digest` is xxh3-64 of the payload, tensor after tensor.

    `block_ids` are the sender's blocks, starting with the one that holds `start`, for transports that read the sender's
    pool; empty if they are those of an earlier frame of the same `window` (named_windows.py). Over mooncake it is one
    number, the payload's start in the sender's ring; over all other transports it is empty.
    """

    ticket_id: str
    epoch: int
    number: int
    layer: int
    tensor: int
    start: int
    end: int
    head_start: int
    head_end: int
    num_bytes: int
    digest: int
    block_ids: tuple[int, ...] = ()
    window: int = 0
    num_tensors: int = 1


@dataclass(frozen=True, slots=True)
class Nack:
    """Frame `number` did not match its digest and must be sent again."""

    ticket_id: str
    epoch: int
    number: int


@dataclass(frozen=True, slots=True)
class Taken:
    """The receiver no longer needs the payload of frame `number`, on transports that share the sender's memory."""

    ticket_id: str
    epoch: int
    number: int


@dataclass(frozen=True, slots=True)
class Commit:
    """All frames are sent: their number, bytes and the sum of their seals (terms.seal_of) modulo 2^64.

    `description` is the serialised prompt.
    """

    ticket_id: str
    epoch: int
    num_frames: int
    kv_bytes: int
    digest_sum: int
    description_digest: int
    description: bytes


@dataclass(frozen=True, slots=True)
class Ack:
    """The receiver has committed."""

    ticket_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Abort:
    """The sender of this message has ended the ticket; `error` is a name of wire.errors."""

    ticket_id: str
    epoch: int
    error: str
    reason: str


@dataclass(frozen=True, slots=True)
class Renew:
    """Renews the lease. From the sender: its engine makes progress; from the receiver: it is receiving bytes."""

    ticket_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Read:
    """The receiver has read all frames from the sender's pool, and asks whether the blocks were held until now."""

    ticket_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Held:
    """The answer to READ: they were, so the read bytes are the announced ones. Otherwise the answer is ABORT."""

    ticket_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """The link is refused; `error` is a name of wire.errors."""

    error: str
    reason: str


@dataclass(frozen=True, slots=True)
class Signal:
    """PING, PONG, PROBE or PROBED: not about a ticket; an answer repeats the number of its request."""

    kind: MessageType
    number: int


SIGNALS = (MessageType.PING, MessageType.PONG, MessageType.PROBE, MessageType.PROBED)
TicketMessage = Open | Frame | Nack | Taken | Commit | Ack | Abort | Renew | Read | Held
_BARE: dict[MessageType, type[Ack | Renew | Read | Held]] = {
    MessageType.ACK: Ack, MessageType.RENEW: Renew, MessageType.READ: Read, MessageType.HELD: Held,
}  # fmt: skip


def encode(message: TicketMessage | Refuse | Signal) -> bytes:
    """Return prefix and body of `message`."""
    match message:
        case Signal(kind, number):
            return pack(kind, _SIGNAL.pack(number))
        case Refuse(error, reason):
            return pack(MessageType.REFUSE, pack_text(error) + pack_text(reason))
        case Open():
            kind, tail = MessageType.OPEN, _OPEN.pack(message.num_tokens, message.first_token)
        case Frame():
            kind, tail = MessageType.FRAME, _encode_frame(message)
        case Nack():
            kind, tail = MessageType.NACK, _NUMBER.pack(message.number)
        case Taken():
            kind, tail = MessageType.TAKEN, _NUMBER.pack(message.number)
        case Commit():
            kind, tail = MessageType.COMMIT, _encode_commit(message)
        case Ack():
            kind, tail = MessageType.ACK, b""
        case Abort():
            kind, tail = MessageType.ABORT, pack_text(message.error) + pack_text(message.reason)
        case Renew():
            kind, tail = MessageType.RENEW, b""
        case Read():
            kind, tail = MessageType.READ, b""
        case Held():
            kind, tail = MessageType.HELD, b""
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
        raise WireError(f"no message of type {kind} with flags {zero}")
    if length > _MAX_BODY[known]:
        raise WireError(f"{known.name} of {length} bytes, the limit is {_MAX_BODY[known]}")
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
        case MessageType.OPEN:
            return Open(ticket_id, epoch, *_OPEN.unpack(tail))
        case MessageType.FRAME:
            return _decode_frame(ticket_id, epoch, tail)
        case MessageType.NACK:
            return Nack(ticket_id, epoch, *_NUMBER.unpack(tail))
        case MessageType.TAKEN:
            return Taken(ticket_id, epoch, *_NUMBER.unpack(tail))
        case MessageType.COMMIT:
            num_frames, kv_bytes, digest_sum, digest = _COMMIT.unpack_from(tail)
            return Commit(ticket_id, epoch, num_frames, kv_bytes, digest_sum, digest, bytes(tail[_COMMIT.size :]))
        case MessageType.ABORT:
            return Abort(ticket_id, epoch, *unpack_texts(tail, 2))
        case MessageType.ACK | MessageType.RENEW | MessageType.READ | MessageType.HELD if not tail:
            return _BARE[kind](ticket_id, epoch)
    raise WireError(f"{kind.name} of {len(body)} bytes is not a message of a ticket")


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
        raise WireError(f"a FRAME names {num_blocks} blocks, the limit is {MAX_FRAME_BLOCKS}")
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
                f"a string of {length} bytes, of which {len(body) - offset} are present; the limit is {MAX_TEXT_BYTES}"
            )
        texts.append(str(body[offset : offset + length], "utf-8"))
        offset += length
    if offset != len(body):
        raise WireError(f"{len(body) - offset} bytes after the last string")
    return texts
