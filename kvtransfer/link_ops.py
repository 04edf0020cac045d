"""The ops posted to a link's queue, and the settings that all links of one sender share."""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace

from devices.interface import Event
from kvtransfer.interface import PoolMemory, SenderEvents, SendStats
from kvtransfer.link_messages import Abort, Ack, Nack, Read, Signal
from kvtransfer.transport_interface import Timeouts, Transport
from processes.failpoints import Failpoints
from security.trust import Trust
from wire.errors import PdserveError
from wire.kv_layout import ONLY_RANK, Rank
from wire.types import Ticket


@dataclass(frozen=True, slots=True)
class PeerKey:
    """One rank of one process of an instance, as a ticket names it."""

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

    On a device, that KV is complete once `mark` is reached.
    """

    ticket_id: str
    layers: tuple[int, ...]
    start: int
    end: int
    block_ids: tuple[int, ...]
    mark: Event | None = None


@dataclass(frozen=True, slots=True)
class FinishTicket:
    """Send the commit. `early_bytes` were announced before the caller posted it."""

    ticket_id: str
    description: bytes
    early_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Drop:
    """The caller has aborted the ticket."""

    ticket_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """A message of the receiver."""

    message: Nack | Read | Ack | Abort


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of a measurement."""

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
    """The receiver's answer to a PING or a PROBE, received at this time of the sender's clock."""

    signal: Signal
    at: float


@dataclass(frozen=True, slots=True)
class LinkOver:
    """The link has ended; `error` is None if this side closes it normally."""

    error: PdserveError | None


@dataclass(frozen=True, slots=True)
class CheckLeases:
    """Check the leases now."""


def merge_puts(ops: Iterable["Op"]) -> list["Op"]:
    """Join the queued puts of one ticket: a link with a backlog sends fewer, larger frames.

    A put that continues an earlier one's tokens in the same layer is joined to it; then layers with the same tokens are
    joined. All else keeps its order. A put still being computed is not joined to an earlier one, because the earlier
    one would then wait for the later mark too.
    """
    return _join(_join(ops, _key_of_layers, _join_adjacent), _key_of_tokens, _with_layers)


def _join(
    ops: Iterable["Op"], key_of: Callable[[Put], Hashable], joined: Callable[[Put, Put], Put | None]
) -> list["Op"]:
    """Merge each put into the last one before it with the same key, unless `joined` returns None."""
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
    """Return whether the put and all before it are computed: marks are reached in order."""
    return put.mark is None or put.mark.is_done


def _key_of_layers(put: Put) -> Hashable:
    return put.ticket_id, put.layers


def _join_adjacent(earlier: Put, later: Put) -> Put | None:
    return replace(later, start=earlier.start) if earlier.end == later.start else None


def _key_of_tokens(put: Put) -> Hashable:
    return put.ticket_id, put.start, put.end


def _with_layers(earlier: Put, later: Put) -> Put | None:
    same = earlier.block_ids is later.block_ids or earlier.block_ids == later.block_ids
    return replace(earlier, layers=earlier.layers + later.layers, mark=later.mark) if same else None


TicketOp = Begin | Put | FinishTicket | Drop | MessageReceived
ProbeOp = Measure | ProbeAnswered
Op = TicketOp | ProbeOp | LinkOver | CheckLeases


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """The settings that all links of one sender share.

    A link calls `acked(ticket_id, stats)` when the receiver has acked. `claim(ticket_id)` is True exactly once: for
    the caller that reports the ticket's failure; the ticket's other links drop it. While `is_open(ticket_id)` is True,
    the ticket's blocks are held; `catch_up()` is False if the aborts made in another process could not be received.
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
    check_interval_s: float
    digests: bool
    links_per_peer: int = 1
    trust: Trust = field(default_factory=Trust)
