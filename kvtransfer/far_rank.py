"""Rank 0's end of a rank that moves its own KV: a sender and a share of the tickets that are messages to its process.

    RanksSender   -> FarSender   ==Unix socket==> RankHalf -> KvSender   ==links==>
    RanksReceiver -> FarReceiver ==Unix socket==> RankHalf -> KvReceiver <==links==
    Quorum       <-> FarShare    <==============> reports of the rank's receiver

Who tells a rank something never waits: it goes through a queue (rank_speaker.py), in the order of the calls. A link of
the rank that has to know what was said asks for it (rank_half.py). A rank that is gone or takes nothing is lost, and
its instance with it: who tells hears nothing.
"""

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn

from kvtransfer.block_tables import TablesSent
from kvtransfer.interface import SenderEvents
from kvtransfer.link import Link
from kvtransfer.quorum import Quorum
from kvtransfer.rank_messages import (
    RankCounters,
    RankMessage,
    pack_bytes,
    pack_numbers,
    pack_ticket,
    unpack_bytes,
    unpack_endpoints,
    unpack_numbers,
    unpack_stats,
)
from kvtransfer.rank_speaker import Speaker
from kvtransfer.ticket_table import ReceiverCounts
from kvtransfer.totals import Life, merge_links
from telemetry.logs import EventLogger
from wire.errors import InternalError, PdserveError, Unavailable
from wire.kv_layout import Rank
from wire.rank_channel import Channel, ChannelClosed, Message
from wire.rank_payloads import pack_error, unpack_error
from wire.trust import LiveAddresses, Trust
from wire.types import KvEndpoint, LinkStatus, Ticket

_log = EventLogger("kvtransfer")
_SAY_S = 10.0
_CLOSE_S = 6.0


class FarRank:
    """Owner of our end of one rank's socket and of two threads: one says what any thread tells it, one hears."""

    def __init__(self, end: socket.socket, rank: Rank, lost: Callable[[str], PdserveError], trust: Trust) -> None:
        """`lost` ends the instance and says why; `trust` is followed: the rank hears of other addresses."""
        self.rank = rank
        self.endpoints: tuple[KvEndpoint, ...] = ()
        self.figures = RankCounters()
        self._socket, self._channel, self._lost, self._trust = end, Channel(end, RankMessage), lost, trust
        self._addresses = frozenset(trust.addresses)
        self._sender: FarSender | None = None
        self._quorum: Quorum | None = None
        self._share = FarShare(self)
        self._following, self._answered = threading.Lock(), threading.Condition()
        self._num_closing, self._closing, self._gone = 0, False, False
        self._speaker = Speaker(self._channel, f"kv-tell-{rank.number}", say_s=_SAY_S, failed=self._untold)
        self._thread = threading.Thread(target=self._hear, name=f"kv-rank-{rank.number}", daemon=True)

    def meet(self, timeout_s: float) -> None:
        """Hear where it listens. Raises its error in words, or why it is lost."""
        try:
            message = self._channel.receive(timeout_s)
            if message.kind == RankMessage.LACKING:
                raise unpack_error(message.payload) or InternalError(f"{self.rank} cannot move its KV")
            if message.kind != RankMessage.HERE:
                raise ValueError(f"{message.kind.name} came where {RankMessage.HERE.name} was due")
            self.endpoints = unpack_endpoints(message.payload)
        except (ChannelClosed, TimeoutError, ValueError) as error:
            raise self._lost(f"{self.rank} did not open its KV links: {error}") from error
        self._thread.start()
        self._speaker.start()
        if isinstance(self._trust.addresses, LiveAddresses):
            self._trust.addresses.watch(self._follow)
            self._follow()  # a table may have come since the settings were made

    def sender(self, events: SenderEvents) -> "FarSender":
        """Return its sender, which reports there."""
        self._sender = FarSender(self, events)
        return self._sender

    def receiver(self, quorum: Quorum) -> "FarReceiver":
        """Return its receiver, whose share of each ticket is settled there."""
        self._quorum = quorum
        quorum.join(self._share)
        return FarReceiver(self)

    def tell(self, said: RankMessage, payload: bytes = b"") -> None:
        """Say something, in the order of the calls. Silent where the rank is gone: the instance ends by then."""
        self._speaker.say(said, payload)

    def tell_close(self, payload: bytes) -> None:
        """Let it close a half, and answer."""
        with self._answered:
            self._closing = True
            self._num_closing += 1
        self.tell(RankMessage.CLOSE, payload)

    def close(self) -> None:
        """Wait until it has closed what it was told to, and stop hearing it. Idempotent."""
        if isinstance(self._trust.addresses, LiveAddresses):
            self._trust.addresses.unwatch(self._follow)
        with self._answered:
            self._closing = True
            self._answered.wait_for(lambda: self._gone or not self._num_closing, _CLOSE_S)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes both threads
        self._speaker.close()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_S)
        self._channel.close()

    def _follow(self) -> None:
        """Tell it the addresses of the table if they are others than it knows."""
        with self._following:
            addresses = frozenset(self._trust.addresses)
            if addresses != self._addresses:
                self._addresses = addresses
                self.tell(RankMessage.ADDRESSES, "\n".join(sorted(addresses)).encode())

    def _untold(self, error: Exception) -> None:
        """It takes nothing any more; that its socket is closed is heard too, and said there."""
        self._end_waits()
        if not isinstance(error, ChannelClosed):
            self._lost(f"{self.rank} takes no word of its hand-offs: {error}")

    def _end_waits(self) -> None:
        with self._answered:
            self._gone = True
            self._answered.notify_all()

    def _hear(self) -> None:
        try:
            while True:
                self._take(self._channel.receive(None))
        except ChannelClosed as error:
            if not self._closing:  # without its half no ticket ends; where its process has ended the reason says how
                self._lost(f"{self.rank} moves its KV no more: {error}")
        except Exception as error:  # noqa: BLE001  the thread's outermost frame: without it no hand-off ends
            _log.error("kv_rank_unheard", exc=error, rank=self.rank.number)
            self._lost(f"what {self.rank} says of its hand-offs is not understood: {error}")
        self._end_waits()

    def _take(self, message: Message[RankMessage]) -> None:
        match message.kind:
            case RankMessage.FIGURES:
                self.figures = RankCounters.from_json(message.payload)
            case RankMessage.CLOSED:
                with self._answered:
                    self._num_closing -= 1
                    self._answered.notify_all()
            case RankMessage.CATCH_UP:
                self.tell(RankMessage.CAUGHT_UP, message.payload)  # behind all that was told before
            case RankMessage.ACKED | RankMessage.FAILED:
                assert self._sender is not None, "a rank sends what it was told to"
                self._sender.take_ending(message)
            case _:
                self._share.take(message, self._quorum)


class FarSender:
    """Implements all_ranks.RankSender. Layers are reported once all ranks have written them: so is this rank's part."""

    def __init__(self, far: FarRank, events: SenderEvents) -> None:
        self._far, self._events = far, events
        self._tables = TablesSent()
        self._putting = threading.Lock()

    @property
    def bytes_sent(self) -> int:
        """KV bytes announced, as it last said."""
        return self._far.figures.bytes_sent

    @property
    def frames_resent(self) -> int:
        """Frames that went out a second time, as it last said."""
        return self._far.figures.frames_resent

    def begin(self, ticket: Ticket) -> None:
        """See Sender."""
        self._tables.begin(ticket.ticket_id)
        self._far.tell(RankMessage.BEGIN, pack_ticket(ticket))

    def put(self, ticket_id: str, layer: int, start: int, end: int, block_ids: Sequence[int]) -> None:
        """See Sender; of the blocks those are told that the rank does not know."""
        with self._putting:
            growth = self._tables.growth(ticket_id, block_ids)
            if growth is not None:
                self._far.tell(RankMessage.PUT, pack_numbers(ticket_id, layer, start, end, growth[0], blocks=growth[1]))

    def commit(self, ticket_id: str, description: bytes) -> None:
        """See Sender."""
        self._tables.end(ticket_id)
        self._far.tell(RankMessage.COMMIT, pack_bytes(ticket_id, description))

    def abort(self, ticket_id: str, reason: str) -> None:
        """See Sender."""
        self._tables.end(ticket_id)
        self._far.tell(RankMessage.ABORT, pack_bytes(ticket_id, reason.encode()))

    def take_ending(self, message: Message[RankMessage]) -> None:
        """Report what the rank says of a ticket's end. Raises ValueError for what it cannot say."""
        ticket_id, rest = unpack_bytes(message.payload)
        self._tables.end(ticket_id)
        if message.kind == RankMessage.ACKED:
            self._events.acked(ticket_id, unpack_stats(rest))
        else:
            self._events.failed(ticket_id, unpack_error(rest) or InternalError("no reason was given"))

    def links(self) -> tuple[LinkStatus, ...]:
        """The links as it last said, one status a peer."""
        return merge_links(self.links_of_ranks())

    def links_of_ranks(self) -> list[tuple[Life, LinkStatus]]:
        """The links as it last said."""
        return list(self._far.figures.links)

    def measure(
        self, peer_id: str, epoch: int, endpoints: Sequence[KvEndpoint], num_bytes: int, timeout_s: float
    ) -> NoReturn:
        """Raises Unavailable: links are measured from rank 0's own process."""
        raise Unavailable(f"the link to {peer_id} starts at {self._far.rank}, in a process that measures none")

    def sweep(self) -> None:
        """The rank's own threads do."""

    def end(self) -> list[Link]:
        """Abort everything there; no link's thread is here."""
        self._far.tell_close(b"sender")
        return []

    def close(self) -> None:
        """See Sender; the receiver's end waits for it."""
        self.end()


class FarReceiver:
    """Implements all_ranks.RankReceiver."""

    def __init__(self, far: FarRank) -> None:
        self._far = far

    @property
    def endpoints(self) -> tuple[KvEndpoint, ...]:
        """Where senders reach it, best first."""
        return self._far.endpoints

    @property
    def counts(self) -> ReceiverCounts:
        """What has come in, as it last said."""
        return self._far.figures.received

    @property
    def bytes_received(self) -> int:
        """KV bytes moved into its pool, as it last said."""
        return self._far.figures.received.bytes_received

    def sweep(self, now: float | None = None) -> None:
        """The rank's own threads do."""

    def end(self) -> list[threading.Thread]:
        """Stop listening there; no thread of it is here."""
        self._far.tell_close(b"receiver")
        return []

    def end_links(self) -> list[threading.Thread]:
        """Wait until both halves are closed there."""
        self._far.close()
        return []

    def close(self) -> None:
        """Both of the above."""
        self.end()
        self.end_links()


class FarShare:
    """Implements quorum.Shares: the rank's part of each ticket, told to it and reported by it."""

    def __init__(self, far: FarRank) -> None:
        self._far = far
        self._progress: dict[str, list[int]] = {}  # one number each: what comes late of a settled ticket goes nowhere

    def check(self, num_tokens: int, first_token: int, block_ids: Sequence[int]) -> None:
        """All ranks have the same blocks: rank 0's share has checked the numbers."""

    def reserve(self, ticket_id: str, num_tokens: int, first_token: int, block_ids: Sequence[int]) -> None:
        """See Shares; what goes wrong there is reported as the share's end."""
        self._progress[ticket_id] = [0]
        self._far.tell(RankMessage.RESERVE, pack_numbers(ticket_id, num_tokens, first_token, blocks=block_ids))

    def progress(self, ticket_id: str) -> int:
        """See Shares: as it last said, some seconds late at most."""
        return self._progress.get(ticket_id, [0])[0]

    def settle(self, ticket_id: str, error: PdserveError | None) -> None:
        """See Shares."""
        self._progress.pop(ticket_id, None)
        self._far.tell(RankMessage.SETTLE, pack_bytes(ticket_id, pack_error(error)))

    def take(self, message: Message[RankMessage], quorum: Quorum | None) -> None:
        """Report what the rank says of its share. Raises ValueError for what it cannot say."""
        assert quorum is not None, "a rank receives what it was told to"
        if message.kind == RankMessage.ENDED:
            ticket_id, rest = unpack_bytes(message.payload)
            quorum.share_ended(ticket_id, unpack_error(rest) or InternalError("no reason was given"))
            return
        if message.kind not in (RankMessage.READY, RankMessage.RELEASED, RankMessage.PROGRESS):
            raise ValueError(f"a rank does not say {message.kind.name}")
        ticket_id, numbers = unpack_numbers(message.payload, 0 if message.kind == RankMessage.RELEASED else 1)
        if message.kind == RankMessage.READY:
            quorum.share_ready(self._far.rank.number, ticket_id, b"", numbers[0])
        elif message.kind == RankMessage.RELEASED:
            quorum.share_released(ticket_id)
        elif (progress := self._progress.get(ticket_id)) is not None:
            progress[0] = numbers[0]
            self._far.tell(RankMessage.OTHERS, pack_numbers(ticket_id, quorum.progress(ticket_id) - numbers[0]))
