"""The messages of a KV link, and who sends which; link_codec.py encodes them.

    sender   HELLO ->           PROOF ->                   (set-up)     OPEN, FRAME ..., COMMIT, RENEW, HELD, ABORT ->
    receiver       <- CHALLENGE       <- WELCOME | REFUSE  (set-up)  <- READY | REFUSE  <- TAKEN, NACK, READ, ACK, ABORT

    to measure a link    sender PING ->, PROBE FRAME ->    receiver <- PONG, <- PROBED

A FRAME right after PROBE belongs to no ticket: its payload is moved like any other, into memory that nobody reads.

The set-up is specific to the transport (with SETUP messages on some).
"""

from dataclasses import dataclass
from enum import IntEnum


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


@dataclass(frozen=True, slots=True)
class Open:
    """The sender is about to send this ticket's frames; it states the token range that it believes is wanted."""

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
    """The receiver has read all frames from the sender's pool, and requests confirmation that the blocks were held."""

    ticket_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Held:
    """The answer to READ: the blocks were held, so the bytes read are those announced. If not, the answer is ABORT."""

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
NumbersMessage = Open | Nack | Taken | Ack | Renew | Read | Held
"""The messages about a ticket that have only numbers besides its id."""
TicketMessage = NumbersMessage | Frame | Commit | Abort
