"""What is posted to a link's queue, and what all links of one sender share."""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvtransfer.frame import Abort, Ack, Nack
from kvtransfer.interface import PoolMemory, SenderEvents
from kvtransfer.transport import Timeouts, Transport
from wire.errors import PdserveError
from wire.failpoints import Failpoints
from wire.trust import Trust
from wire.types import Ticket


@dataclass(frozen=True, slots=True)
class Begin:
    """Open a ticket on the link."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Put:
    """Send the frames of every KV tensor of `layer` for tokens [start, end)."""

    ticket_id: str
    layer: int
    start: int
    end: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """Send the commit."""

    ticket_id: str
    description: bytes


@dataclass(frozen=True, slots=True)
class Drop:
    """The caller aborted."""

    ticket_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Heard:
    """The receiver said something."""

    message: Nack | Ack | Abort


@dataclass(frozen=True, slots=True)
class Lost:
    """The link is over; `error` is None when this side closes it in peace."""

    error: PdserveError | None


@dataclass(frozen=True, slots=True)
class Tend:
    """Look at the leases now."""


TicketOp = Begin | Put | Finish | Drop | Heard
Op = TicketOp | Lost | Tend


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """What all links of one sender share. `claim(ticket_id)` is True exactly once: the right to report its ending."""

    instance_id: str
    epoch: int
    memory: PoolMemory
    transports: tuple[Transport, ...]
    events: SenderEvents
    claim: Callable[[str], bool]
    clock: Callable[[], float]
    progress_age: Callable[[], float]
    failpoints: Failpoints
    timeouts: Timeouts
    tend_interval_s: float
    digests: bool
    trust: Trust = field(default_factory=Trust)
