"""Rank 0's proxies for a rank that transfers its own KV: its sender, its receiver and its share of each ticket.

    RanksSender   -> FarSender   ==Unix socket==> RankTransfer -> KvSender   ==links==>
    RanksReceiver -> FarReceiver ==Unix socket==> RankTransfer -> KvReceiver <==links==
    Quorum       <-> FarShare    <==============> reports of the rank's receiver

Sending to a rank never blocks the caller: messages go through a queue (rank_outbox.py), in the order of the calls. A
link of the rank that needs all messages sent so far sends CATCH_UP and waits for CAUGHT_UP (rank_transfer.py). A rank
that has exited or stops reading is lost, and its instance with it; the callers get no error.
"""

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn

from kvtransfer.block_tables import TablesSent
from kvtransfer.interface import SenderEvents, SendStats
from kvtransfer.link import Link
from kvtransfer.quorum import Quorum
from kvtransfer.rank_messages import (
    RankCounters,
    RankMessage,
    pack_bytes,
    pack_numbers,
    unpack_bytes,
    unpack_numbers,
)
from kvtransfer.rank_outbox import RankOutbox
from kvtransfer.receiver_counts import ReceiverCounts
from kvtransfer.totals import PeerProcess, merge_links
from processes.rank_channel import Channel, ChannelClosed, Message
from processes.rank_payloads import from_json, pack_error, to_json, unpack_error
from security.trust import LiveAddresses, Trust
from telemetry.logs import EventLogger
from wire.errors import InternalError, PdserveError, Unavailable
from wire.kv_layout import Rank
from wire.load import LinkStatus
from wire.types import KvEndpoint, Ticket

_log = EventLogger("kvtransfer")
_SEND_S = 10.0
_CLOSE_S = 6.0


class FarRank:
    """Owner of our end of one rank's socket and of two threads: one sends the queued messages, one receives."""

    def __init__(
        self, end: socket.socket, rank: Rank, lost: Callable[[str], PdserveError], trust: Trust,
        num_marks: Callable[[], int] = lambda: 0,
    ) -> None:  # fmt: skip
        """`lost` ends the instance and returns the error; changed addresses of `trust` are sent to the rank.

        `num_marks` counts the marks of rank 0's pool; the rank makes its own in the same order.
        """
        self.rank = rank
        self.endpoints: tuple[KvEndpoint, ...] = ()
        self.counters = RankCounters()
        self.num_marks = num_marks
        self._socket, self._channel, self._lost, self._trust = end, Channel(end, RankMessage), lost, trust
        self._addresses = frozenset(trust.addresses)
        self._sender: FarSender | None = None
        self._quorum: Quorum | None = None
        self._share = FarShare(self)
        self._following, self._answered = threading.Lock(), threading.Condition()
        self._num_closing, self._closing, self._gone = 0, False, False
        self._outbox = RankOutbox(self._channel, f"kv-post-{rank.number}", send_s=_SEND_S, failed=self._send_failed)
        self._thread = threading.Thread(target=self._receive, name=f"kv-rank-{rank.number}", daemon=True)

    def start(self, timeout_s: float) -> None:
        """Receive the rank's endpoints, then start the threads. Raises the rank's error or that of `lost`."""
        try:
            message = self._channel.receive(timeout_s)
            if message.kind == RankMessage.LACKING:
                raise unpack_error(message.payload) or InternalError(f"{self.rank} cannot transfer its KV")
            if message.kind != RankMessage.HERE:
                raise ValueError(f"received {message.kind.name}, expected {RankMessage.HERE.name}")
            self.endpoints = from_json(tuple[KvEndpoint, ...], message.payload)
        except (ChannelClosed, TimeoutError, ValueError) as error:
            raise self._lost(f"{self.rank} did not open its KV links: {error}") from error
        self._thread.start()
        self._outbox.start()
        if isinstance(self._trust.addresses, LiveAddresses):
            self._trust.addresses.watch(self._follow)
            self._follow()  # the table may have changed since the settings were made

    def sender(self, events: SenderEvents) -> "FarSender":
        """Return the rank's sender, which reports to `events`."""
        self._sender = FarSender(self, events)
        return self._sender

    def receiver(self, quorum: Quorum) -> "FarReceiver":
        """Return the rank's receiver; `quorum` settles the rank's share of each ticket."""
        self._quorum = quorum
        quorum.join(self._share)
        return FarReceiver(self)

    def send(self, kind: RankMessage, payload: bytes = b"") -> None:
        """Queue a message, in the order of the calls. Dropped if the rank is gone: the instance shuts down then."""
        self._outbox.send(kind, payload)

    def send_close(self, payload: bytes) -> None:
        """Request that the rank close one half and reply."""
        with self._answered:
            self._closing = True
            self._num_closing += 1
        self.send(RankMessage.CLOSE, payload)

    def close(self) -> None:
        """Wait until the rank has closed the halves that `send_close` named, then stop receiving. Idempotent."""
        if isinstance(self._trust.addresses, LiveAddresses):
            self._trust.addresses.unwatch(self._follow)
        with self._answered:
            self._closing = True
            self._answered.wait_for(lambda: self._gone or not self._num_closing, _CLOSE_S)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes both threads
        self._outbox.close()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_S)
        self._channel.close()

    def _follow(self) -> None:
        """Send the rank the addresses of the table if they have changed."""
        with self._following:
            addresses = frozenset(self._trust.addresses)
            if addresses != self._addresses:
                self._addresses = addresses
                self.send(RankMessage.ADDRESSES, "\n".join(sorted(addresses)).encode())

    def _send_failed(self, error: Exception) -> None:
        """Handle a failed send: the rank accepts nothing more. A closed socket is reported by the receiving thread."""
        self._end_waits()
        if not isinstance(error, ChannelClosed):
            self._lost(f"{self.rank} does not accept messages: {error}")

    def _end_waits(self) -> None:
        with self._answered:
            self._gone = True
            self._answered.notify_all()

    def _receive(self) -> None:
        try:
            while True:
                self._take(self._channel.receive(None))
        except ChannelClosed as error:
            if not self._closing:  # without the rank's half no ticket can end
                self._lost(f"{self.rank} stopped transferring its KV: {error}")
        except Exception as error:  # noqa: BLE001  the outermost frame of the thread that ends hand-offs
            _log.error("kv_rank_message_invalid", error, rank=self.rank.number)
            self._lost(f"invalid message from {self.rank}: {error}")
        self._end_waits()

    def _take(self, message: Message[RankMessage]) -> None:
        match message.kind:
            case RankMessage.COUNTERS:
                self.counters = from_json(RankCounters, message.payload)
            case RankMessage.CLOSED:
                with self._answered:
                    self._num_closing -= 1
                    self._answered.notify_all()
            case RankMessage.CATCH_UP:
                self.send(RankMessage.CAUGHT_UP, message.payload)  # after all earlier messages
            case RankMessage.ACKED | RankMessage.FAILED:
                assert self._sender is not None, "a rank only sends tickets that were begun on it"
                self._sender.report_end(message)
            case _:
                self._share.take(message, self._quorum)


class FarSender:
    """Implements all_ranks.RankSender. A put carries the number of rank 0's mark after the layer.

    The rank may not have launched that layer yet: it waits until it has made as many marks of its own.
    """

    def __init__(self, far: FarRank, events: SenderEvents) -> None:
        self._far, self._events = far, events
        self._tables = TablesSent()
        self._putting = threading.Lock()

    @property
    def bytes_sent(self) -> int:
        """KV bytes announced, as last reported by the rank."""
        return self._far.counters.bytes_sent

    @property
    def frames_resent(self) -> int:
        """Frames that were sent again, as last reported by the rank."""
        return self._far.counters.frames_resent

    def begin(self, ticket: Ticket) -> None:
        """See Sender."""
        self._tables.begin(ticket.ticket_id)
        self._far.send(RankMessage.BEGIN, to_json(ticket))

    def put(self, ticket_id: str, layer: int, start: int, end: int, block_ids: Sequence[int]) -> None:
        """See Sender; only the blocks that the rank does not know yet are sent to it."""
        with self._putting:
            growth = self._tables.growth(ticket_id, block_ids)
            if growth is not None:
                numbers = (layer, start, end, self._far.num_marks(), growth[0])
                self._far.send(RankMessage.PUT, pack_numbers(ticket_id, *numbers, blocks=growth[1]))

    def commit(self, ticket_id: str, description: bytes) -> None:
        """See Sender."""
        self._tables.end(ticket_id)
        self._far.send(RankMessage.COMMIT, pack_bytes(ticket_id, description))

    def abort(self, ticket_id: str, reason: str) -> None:
        """See Sender."""
        self._tables.end(ticket_id)
        self._far.send(RankMessage.ABORT, pack_bytes(ticket_id, reason.encode()))

    def report_end(self, message: Message[RankMessage]) -> None:
        """Report the end of a ticket received from the rank. Raises ValueError for a malformed message."""
        ticket_id, rest = unpack_bytes(message.payload)
        self._tables.end(ticket_id)
        if message.kind == RankMessage.ACKED:
            self._events.acked(ticket_id, from_json(SendStats, rest))
        else:
            self._events.failed(ticket_id, unpack_error(rest) or InternalError("no reason was given"))

    def links(self) -> tuple[LinkStatus, ...]:
        """Return the links as last reported, one status per peer."""
        return merge_links(self.links_of_ranks())

    def links_of_ranks(self) -> list[tuple[PeerProcess, LinkStatus]]:
        """Return the links as last reported."""
        return list(self._far.counters.links)

    def measure(
        self, peer_id: str, epoch: int, endpoints: Sequence[KvEndpoint], num_bytes: int, timeout_s: float
    ) -> NoReturn:
        """Raises Unavailable: links are measured from rank 0's own process."""
        raise Unavailable(f"the link to {peer_id} starts at {self._far.rank}, whose process does not measure links")

    def sweep(self) -> None:
        """Do nothing: the rank's own threads sweep."""

    def end(self) -> list[Link]:
        """Abort all tickets there; returns no links, as their threads run in the rank's process."""
        self._far.send_close(b"sender")
        return []

    def close(self) -> None:
        """See Sender; the receiver's close waits until it is done."""
        self.end()


class FarReceiver:
    """Implements all_ranks.RankReceiver."""

    def __init__(self, far: FarRank) -> None:
        self._far = far

    @property
    def endpoints(self) -> tuple[KvEndpoint, ...]:
        """Endpoints at which senders reach it, best first."""
        return self._far.endpoints

    @property
    def counts(self) -> ReceiverCounts:
        """Counts of what was received, as last reported by the rank."""
        return self._far.counters.received

    @property
    def bytes_received(self) -> int:
        """KV bytes copied into its pool, as last reported by the rank."""
        return self._far.counters.received.bytes_received

    def sweep(self, now: float | None = None) -> None:
        """Do nothing: the rank's own threads sweep."""

    def end(self) -> list[threading.Thread]:
        """Stop listening there; returns no threads, because they run in the rank's process."""
        self._far.send_close(b"receiver")
        return []

    def end_links(self) -> list[threading.Thread]:
        """Wait until both halves are closed in the rank's process."""
        self._far.close()
        return []

    def close(self) -> None:
        """Do what `end` and `end_links` do."""
        self.end()
        self.end_links()


class FarShare:
    """Implements quorum.Shares: the rank's part of each ticket, by messages to and from the rank."""

    def __init__(self, far: FarRank) -> None:
        self._far = far
        self._progress: dict[str, list[int]] = {}  # one number each; late reports of a settled ticket are dropped

    def check(self, num_tokens: int, first_token: int, block_ids: Sequence[int]) -> None:
        """Do nothing: all ranks have the same blocks, and rank 0's share has checked the numbers."""

    def reserve(self, ticket_id: str, num_tokens: int, first_token: int, block_ids: Sequence[int]) -> None:
        """See Shares; an error in the rank is reported as the share's end."""
        self._progress[ticket_id] = [0]
        self._far.send(RankMessage.RESERVE, pack_numbers(ticket_id, num_tokens, first_token, blocks=block_ids))

    def progress(self, ticket_id: str) -> int:
        """See Shares: the number last reported, at most a few seconds old."""
        return self._progress.get(ticket_id, [0])[0]

    def settle(self, ticket_id: str, error: PdserveError | None) -> None:
        """See Shares."""
        self._progress.pop(ticket_id, None)
        self._far.send(RankMessage.SETTLE, pack_bytes(ticket_id, pack_error(error)))

    def take(self, message: Message[RankMessage], quorum: Quorum | None) -> None:
        """Handle the rank's report on its share. Raises ValueError for a message that a rank does not send."""
        assert quorum is not None, "a rank only reports on tickets reserved on it"
        if message.kind == RankMessage.ENDED:
            ticket_id, rest = unpack_bytes(message.payload)
            quorum.share_ended(ticket_id, unpack_error(rest) or InternalError("no reason was given"))
            return
        if message.kind not in (RankMessage.READY, RankMessage.RELEASED, RankMessage.PROGRESS):
            raise ValueError(f"a rank does not send {message.kind.name}")
        ticket_id, numbers = unpack_numbers(message.payload, 0 if message.kind == RankMessage.RELEASED else 1)
        if message.kind == RankMessage.READY:
            quorum.share_ready(self._far.rank.number, ticket_id, b"", numbers[0])
        elif message.kind == RankMessage.RELEASED:
            quorum.share_released(ticket_id)
        elif (progress := self._progress.get(ticket_id)) is not None:
            progress[0] = numbers[0]
            self._far.send(RankMessage.OTHERS, pack_numbers(ticket_id, quorum.progress(ticket_id) - numbers[0]))
