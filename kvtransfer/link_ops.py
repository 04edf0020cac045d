"""What is posted to a link's queue, and what all links of one sender share."""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace

from devices.interface import Event
from kvtransfer.frame import Abort, Ack, Nack, Read, Signal
from kvtransfer.interface import PoolMemory, SenderEvents, SendStats
from kvtransfer.transport import Timeouts, Transport
from wire.errors import PdserveError
from wire.failpoints import Failpoints
from wire.kv_layout import ONLY_RANK, Rank
from wire.trust import Trust
from wire.types import Ticket


@dataclass(frozen=True, slots=True)
class PeerKey:
    """One rank of one life of one instance's process, as a ticket names it."""

    instance_id: str
    epoch: int
    rank: Rank = ONLY_RANK


@dataclass(frozen=True, slots=True)
class Begin:
    """Open a ticket on the link."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Put:
    """Send the frames of every KV tensor of `layers` for tokens [start, end).

    They are complete behind `mark`, where the pool lies on a device.
    """

    ticket_id: str
    layers: tuple[int, ...]
    start: int
    end: int
    block_ids: tuple[int, ...]
    mark: Event | None = None


@dataclass(frozen=True, slots=True)
class FinishTicket:
    """Send the commit. `early_bytes` had been announced when the caller posted it."""

    ticket_id: str
    description: bytes
    early_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Drop:
    """The caller aborted."""

    ticket_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """The receiver said something."""

    message: Nack | Read | Ack | Abort


@dataclass(frozen=True, slots=True)
class Measured:
    """What a measurement found."""

    round_trip_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Measure:
    """Measure the link with `num_bytes` until `deadline`; `done` is called once, on a thread of the link."""

    num_bytes: int
    deadline: float
    done: Callable[[Measured | PdserveError], None]


@dataclass(frozen=True, slots=True)
class ProbeAnswered:
    """The receiver answered a PING or a PROBE, at this time of the sender's clock."""

    signal: Signal
    at: float


@dataclass(frozen=True, slots=True)
class LinkOver:
    """The link is over; `error` is None when this side closes it in peace."""

    error: PdserveError | None


@dataclass(frozen=True, slots=True)
class Tend:
    """Look at the leases now."""


def merge_puts(ops: Iterable["Op"]) -> list["Op"]:
    """Join the puts of one ticket that wait behind each other: a link that is behind sends fewer, larger frames.

    A later put goes out with the earlier one whose tokens it continues in the same layer; then layers whose tokens are
    the same go out together. All else keeps its order. What is still being computed is joined to nothing before it,
    which would wait for its mark too.
    """
    return _join(_join(ops, _key_of_layers, _continued), _key_of_tokens, _with_layers)


def _join(
    ops: Iterable["Op"], key_of: Callable[[Put], Hashable], joined: Callable[[Put, Put], Put | None]
) -> list["Op"]:
    """Put each put into the last one before it of its key, where `joined` can."""
    kept: list[Op] = []
    places: dict[Hashable, int] = {}
    for op in ops:
        if isinstance(op, Put):
            key = key_of(op)
            earlier = kept[places[key]] if key in places else None
            both = joined(earlier, op) if isinstance(earlier, Put) and _is_complete(op) else None
            if both is not None:
                kept[places[key]] = both
                continue
            places[key] = len(kept)
        kept.append(op)
    return kept


def _is_complete(put: Put) -> bool:
    """Whether nothing is to be waited for, nor for any put before it: marks are reached in their order."""
    return put.mark is None or put.mark.is_done


def _key_of_layers(put: Put) -> Hashable:
    return put.ticket_id, put.layers


def _continued(earlier: Put, later: Put) -> Put | None:
    return replace(later, start=earlier.start) if earlier.end == later.start else None


def _key_of_tokens(put: Put) -> Hashable:
    return put.ticket_id, put.start, put.end


def _with_layers(earlier: Put, later: Put) -> Put | None:
    same = earlier.block_ids is later.block_ids or earlier.block_ids == later.block_ids
    return replace(earlier, layers=earlier.layers + later.layers, mark=later.mark) if same else None


TicketOp = Begin | Put | FinishTicket | Drop | MessageReceived
ProbeOp = Measure | ProbeAnswered
Op = TicketOp | ProbeOp | LinkOver | Tend


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """What all links of one sender share.

    `acked(ticket_id, stats)` is told by each link that a ticket went over. `claim(ticket_id)` is True exactly once: the
    right to report that it failed; the ticket's other links drop it. While `is_open(ticket_id)` its blocks are held;
    `catch_up()` is False where what was dropped in another process could not be heard.
    """

    instance_id: str
    epoch: int
    memory: PoolMemory
    transports: tuple[Transport, ...]
    events: SenderEvents
    acked: Callable[[str, SendStats], None]
    claim: Callable[[str], bool]
    is_open: Callable[[str], bool]
    catch_up: Callable[[], bool] | None
    clock: Callable[[], float]
    progress_age: Callable[[], float]
    failpoints: Failpoints
    timeouts: Timeouts
    tend_interval_s: float
    digests: bool
    links_per_peer: int = 1
    trust: Trust = field(default_factory=Trust)
