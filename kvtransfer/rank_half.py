"""A rank's half of the hand-off in its own process: its sender, its receiver, and the way to rank 0 (far_rank.py).

rank 0 == Unix socket ==> heard: in their order, by the hearing thread, or by a link's that has to know what was said
       <= Unix socket === said:  by one thread, from a queue, so that who reports something never waits

A ticket that a link's peer names may still be in rank 0's queue, and so may the abort of one that is to be committed:
the link's thread says CATCH_UP, and hears until CAUGHT_UP comes, which lies behind all that was said before.

The tickets and their endings are rank 0's: here a receiver asks for nothing, and what happens to its share is reported.
"""

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NoReturn, Self

from kvtransfer.block_tables import TablesReceived
from kvtransfer.interface import PoolMemory, SendStats
from kvtransfer.quorum import Shares
from kvtransfer.rank_messages import (
    HalfSettings,
    RankCounters,
    RankMessage,
    pack_bytes,
    pack_endpoints,
    pack_numbers,
    pack_stats,
    unpack_bytes,
    unpack_numbers,
    unpack_ticket,
)
from kvtransfer.rank_speaker import Speaker
from kvtransfer.receiver import KvReceiver
from kvtransfer.sender import KvSender
from native.ticker import run_time
from telemetry.logs import EventLogger
from wire.errors import HandoffFailed, InternalError, PdserveError
from wire.rank_channel import Channel, ChannelClosed, Message
from wire.rank_payloads import pack_error, unpack_error
from wire.secret import Secret
from wire.trust import LiveAddresses, Trust

_log = EventLogger("kvtransfer")
_SAY_S, _JOIN_S, _LOOK_S = 10.0, 6.0, 1.0


class RankHalf:
    """Owner of one rank's sender and receiver over its own pool, of its end of the socket and of two threads."""

    def __init__(
        self, memory: PoolMemory, settings: HalfSettings, end: socket.socket, progress_age: Callable[[], float]
    ) -> None:
        """Open both and tell rank 0 where we listen. Raises PdserveError, which rank 0 hears too."""
        self._socket, self._channel = end, Channel(end, RankMessage)
        self._speaker = Speaker(
            self._channel, "kv-rank-say", say_s=_SAY_S, failed=self._broken, tick=self._tell_figures
        )  # fmt: skip
        self._reports = Reports(self._speaker.say, self.catch_up)
        self._tables = TablesReceived()
        self._hearing = threading.Lock()
        self._asked, self._num_answered = itertools.count(1), 0
        self._closing = threading.Event()
        self._told = RankCounters()
        self._addresses = LiveAddresses(settings.addresses)
        secret = None if settings.secret is None else Secret(bytes.fromhex(settings.secret))
        trust = Trust(secret, self._addresses, settings.loopback)
        try:
            with contextlib.ExitStack() as undo:
                self._receiver = self._receive(memory, settings, trust)
                undo.callback(self._receiver.close)
                self._sender = self._send(memory, settings, trust, progress_age)
                undo.pop_all()
        except PdserveError as error:
            self._channel.send(RankMessage.LACKING, pack_error(error), timeout_s=_SAY_S)
            raise
        self._channel.send(RankMessage.HERE, pack_endpoints(self._receiver.endpoints), timeout_s=_SAY_S)
        self._thread = threading.Thread(target=self._hear, name="kv-rank-hear", daemon=True)
        self._thread.start()
        self._speaker.start()

    def catch_up(self) -> bool:
        """Do all that rank 0 has said before this call, and tell whether that came in time.

        Not to be called with a lock of the hand-off.
        """
        number, deadline = next(self._asked), time.monotonic() + _SAY_S
        self._speaker.say(RankMessage.CATCH_UP, pack_numbers("", number))
        with self._hearing:
            try:
                while self._num_answered < number and not self._closing.is_set() and time.monotonic() < deadline:
                    if self._channel.has_more(_LOOK_S):
                        self._take(self._channel.receive(_SAY_S))
            except (OSError, ValueError) as error:
                self._broken(error)
            return self._num_answered >= number

    def close(self) -> None:
        """End both and the threads. Idempotent."""
        self._closing.set()
        self._sender.close()
        self._receiver.close()
        self._speaker.close()
        self._thread.join(_JOIN_S)
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _receive(self, memory: PoolMemory, settings: HalfSettings, trust: Trust) -> KvReceiver:
        return KvReceiver(
            memory, instance_id=settings.instance_id, epoch=settings.epoch, host=settings.host,
            transports=settings.transports, quorum=self._reports, clock=run_time,
            lease_s=settings.lease_s, port_range=settings.port_range, digests=settings.digests, trust=trust,
        )  # fmt: skip

    def _send(
        self, memory: PoolMemory, settings: HalfSettings, trust: Trust, progress_age: Callable[[], float]
    ) -> KvSender:
        return KvSender(
            memory, instance_id=settings.instance_id, epoch=settings.epoch, transports=settings.transports,
            events=_Endings(self._speaker.say, self._tables.end), clock=run_time, progress_age=progress_age,
            links_per_peer=settings.links_per_peer, digests=settings.digests, trust=trust, source=settings.source,
            catch_up=self.catch_up,
        )  # fmt: skip

    def _hear(self) -> None:
        """Do what rank 0 says, until it is gone: then this process is about to end."""
        try:
            while not self._closing.is_set():
                if self._channel.has_more(_LOOK_S):
                    with self._hearing:
                        if self._channel.has_more(0):  # else a link's thread was faster
                            self._take(self._channel.receive(_SAY_S))
        except Exception as error:  # noqa: BLE001  the thread's outermost frame: a rank that is deaf must not stay
            self._broken(error)

    def _broken(self, error: Exception) -> None:
        """Let rank 0 hear the end of a socket on which nothing is heard or said any more: this rank is lost."""
        if self._closing.is_set():
            return
        if isinstance(error, ChannelClosed):
            _log.info("kv_rank_0_gone", reason=error)
        else:
            _log.error("kv_rank_0_not_understood", exc=error)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _take(self, message: Message[RankMessage]) -> None:
        try:
            self._do(message)
        except Exception as error:  # noqa: BLE001  a defect over one ticket must not keep the others from being heard
            _log.error("kv_rank_failed", exc=error, said=message.kind.name)

    def _do(self, message: Message[RankMessage]) -> None:
        payload = message.payload
        match message.kind:
            case RankMessage.BEGIN:
                ticket = unpack_ticket(payload)
                self._tables.begin(ticket.ticket_id)
                self._sender.begin(ticket)
            case RankMessage.PUT:
                ticket_id, (layer, start, end, kept, *more) = unpack_numbers(payload, 4)
                blocks = self._tables.take(ticket_id, kept, more)
                if blocks is not None:
                    self._sender.put(ticket_id, layer, start, end, blocks)
            case RankMessage.COMMIT:
                ticket_id, description = unpack_bytes(payload)
                self._tables.end(ticket_id)
                self._sender.commit(ticket_id, description)
            case RankMessage.ABORT:
                ticket_id, reason = unpack_bytes(payload)
                self._tables.end(ticket_id)
                self._sender.abort(ticket_id, reason.decode())
            case RankMessage.CAUGHT_UP:
                _, (number, *_) = unpack_numbers(payload, 1)
                self._num_answered = max(self._num_answered, number)
            case RankMessage.ADDRESSES:
                self._addresses.replace(payload.decode().split())
            case RankMessage.CLOSE:
                half = self._sender if payload == b"sender" else self._receiver
                threading.Thread(target=self._close_half, args=(half,), name="kv-rank-close", daemon=True).start()
            case _:
                self._reports.take(message)

    def _close_half(self, half: KvSender | KvReceiver) -> None:
        half.close()
        self._tell_figures()
        self._speaker.say(RankMessage.CLOSED)

    def _tell_figures(self) -> None:
        sender, receiver = self._sender, self._receiver
        now = RankCounters(tuple(sender.links_of_ranks()), sender.bytes_sent, sender.frames_resent, receiver.counts)
        if now != self._told:
            self._told = now
            self._speaker.say(RankMessage.FIGURES, now.to_json())


class _Endings:
    """Implements SenderEvents: rank 0 hears of each, and the ticket's table is forgotten."""

    def __init__(self, say: Callable[[RankMessage, bytes], None], forget: Callable[[str], None]) -> None:
        self._say, self._forget = say, forget

    def acked(self, ticket_id: str, stats: SendStats) -> None:
        """See SenderEvents."""
        self._forget(ticket_id)
        self._say(RankMessage.ACKED, pack_bytes(ticket_id, pack_stats(stats)))

    def failed(self, ticket_id: str, error: PdserveError) -> None:
        """See SenderEvents."""
        self._forget(ticket_id)
        self._say(RankMessage.FAILED, pack_bytes(ticket_id, pack_error(error)))


class Reports:
    """Implements quorum.Book for a rank's receiver: rank 0 hears what it reports, and says what becomes of a ticket."""

    def __init__(self, say: Callable[[RankMessage, bytes], None], catch_up: Callable[[], bool]) -> None:
        self._say, self._catch_up = say, catch_up
        self._share: Shares | None = None
        self._others: dict[str, int] = {}  # how far the other ranks were, by ticket

    def catch_up(self) -> None:
        """See Book."""
        self._catch_up()

    def join(self, shares: Shares) -> None:
        """Be told by rank 0 what these are to do."""
        self._share = shares

    def share_ready(self, rank: int, ticket_id: str, description: bytes, kv_bytes: int) -> None:
        """See ShareReports. What the prompt is comes to rank 0 alone."""
        self._say(RankMessage.READY, pack_numbers(ticket_id, kv_bytes))

    def share_ended(self, ticket_id: str, error: PdserveError) -> None:
        """See ShareReports."""
        self._say(RankMessage.ENDED, pack_bytes(ticket_id, pack_error(error)))

    def share_released(self, ticket_id: str) -> None:
        """See ShareReports."""
        self._say(RankMessage.RELEASED, pack_numbers(ticket_id))

    def progress(self, ticket_id: str) -> int:
        """See ShareReports: of the others it is what rank 0 said when this was asked before."""
        share = self._share
        own = 0 if share is None else share.progress(ticket_id)
        self._say(RankMessage.PROGRESS, pack_numbers(ticket_id, own))
        return own + self._others.get(ticket_id, 0)

    def reserve(self, ticket_id: str, num_tokens: int, first_token: int, block_ids: Sequence[int]) -> NoReturn:
        """Raises InternalError: rank 0 makes tickets."""
        raise InternalError(f"ticket {ticket_id} was asked of a rank that makes none")

    def abort(self, ticket_id: str, reason: str) -> None:
        """Let rank 0 end a ticket."""
        self.share_ended(ticket_id, HandoffFailed(reason))

    def close(self, reason: str) -> None:
        """The tickets are rank 0's to end."""

    def take(self, message: Message[RankMessage]) -> None:
        """Do what rank 0 says of a ticket. Raises ValueError for what it does not say."""
        assert self._share is not None, "the receiver is made before it hears anything"
        if message.kind == RankMessage.RESERVE:
            ticket_id, (num_tokens, first_token, *blocks) = unpack_numbers(message.payload, 2)
            self._others[ticket_id] = 0
            try:
                self._share.reserve(ticket_id, num_tokens, first_token, blocks)
            except Exception as error:  # noqa: BLE001  whatever it is: blocks that no one gives back are lost
                _log.error("kv_share_failed", exc=error, ticket=ticket_id)
                self.share_ended(ticket_id, InternalError(f"a rank could make no share of the ticket: {error}"))
                self.share_released(ticket_id)
        elif message.kind == RankMessage.SETTLE:
            ticket_id, rest = unpack_bytes(message.payload)
            self._others.pop(ticket_id, None)
            self._share.settle(ticket_id, unpack_error(rest))
        elif message.kind == RankMessage.OTHERS:
            ticket_id, (others, *_) = unpack_numbers(message.payload, 1)
            if ticket_id in self._others:
                self._others[ticket_id] = others
        else:
            raise ValueError(f"rank 0 does not say {message.kind.name} to a rank")
