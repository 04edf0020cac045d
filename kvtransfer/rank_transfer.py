"""A rank's half of the hand-off in its own process: its sender, its receiver, and the messages to rank 0 (far_rank.py).

rank 0 == Unix socket ==> received: in order, by the receiving thread, or by a link's thread that must catch up
       <= Unix socket === sent:     by one thread, from a queue, so that reports never block

A ticket that a link's peer names may still be in rank 0's queue, and so may the abort of a ticket about to be
committed: so the link's thread sends CATCH_UP, and handles messages until CAUGHT_UP arrives. Rank 0 sends CAUGHT_UP
after all earlier messages.

Rank 0 decides on tickets; the receiver here only reports on its shares.
"""

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn, Self

from kvtransfer.block_tables import TablesReceived
from kvtransfer.device_memory import device_memory
from kvtransfer.interface import PoolMemory, SendStats
from kvtransfer.quorum import Shares
from kvtransfer.rank_messages import (
    RankCounters,
    RankMessage,
    pack_bytes,
    pack_numbers,
    unpack_bytes,
    unpack_numbers,
)
from kvtransfer.rank_outbox import RankOutbox
from kvtransfer.rank_settings import RankTransferSettings
from kvtransfer.receiver import KvReceiver
from kvtransfer.sender import KvSender
from processes.rank_channel import Channel, ChannelClosed, Message
from processes.rank_payloads import from_json, pack_error, to_json, unpack_error
from security.secret import Secret
from security.trust import LiveAddresses, Trust
from telemetry.logs import EventLogger
from wire.errors import HandoffFailed, InternalError, PdserveError
from wire.types import Ticket

_log = EventLogger("kvtransfer")
_SEND_S, _JOIN_S, _POLL_S = 10.0, 6.0, 1.0


class RankTransfer:
    """Owner of one rank's sender and receiver over its own pool, of its end of the socket and of two threads."""

    def __init__(
        self, memory: PoolMemory, settings: RankTransferSettings, end: socket.socket, progress_age: Callable[[], float]
    ) -> None:
        """Open both and send rank 0 our endpoints. Raises PdserveError, which is sent to rank 0 too."""
        self._memory, self._socket, self._channel = memory, end, Channel(end, RankMessage)
        self._outbox = RankOutbox(
            self._channel, "kv-rank-say", send_s=_SEND_S, failed=self._broken, tick=self._send_counters
        )  # fmt: skip
        self._reports = Reports(self._outbox.send, self.catch_up)
        self._tables = TablesReceived()
        self._receiving = threading.Lock()
        self._catch_ups, self._num_answered = itertools.count(1), 0
        self._closing = threading.Event()
        self._sent_counters = RankCounters()
        self._addresses = LiveAddresses(settings.addresses)
        secret = None if settings.secret is None else Secret(bytes.fromhex(settings.secret))
        trust = Trust(secret, self._addresses, settings.loopback)
        try:
            with contextlib.ExitStack() as undo:
                self._receiver = settings.receiver(memory, self._reports, trust)
                undo.callback(self._receiver.close)
                events = _TicketEvents(self._outbox.send, self._tables.end)
                self._sender = settings.sender(memory, events, trust, progress_age, self.catch_up)
                undo.pop_all()
        except PdserveError as error:
            self._channel.send(RankMessage.LACKING, pack_error(error), timeout_s=_SEND_S)
            raise
        self._channel.send(RankMessage.HERE, to_json(self._receiver.endpoints), timeout_s=_SEND_S)
        self._thread = threading.Thread(target=self._handle_messages, name="kv-rank-read", daemon=True)
        self._thread.start()
        self._outbox.start()

    def catch_up(self) -> bool:
        """Handle all messages that rank 0 sent before this call, and return whether they arrived in time.

        Must not be called with a lock of the hand-off held.
        """
        number, deadline = next(self._catch_ups), time.monotonic() + _SEND_S
        self._outbox.send(RankMessage.CATCH_UP, pack_numbers("", number))
        with self._receiving:
            try:
                while self._num_answered < number and not self._closing.is_set() and time.monotonic() < deadline:
                    if self._channel.has_more(_POLL_S):
                        self._take(self._channel.receive(_SEND_S))
            except (OSError, ValueError) as error:
                self._broken(error)
            return self._num_answered >= number

    def close(self) -> None:
        """Close the sender and receiver, and end the threads. Idempotent."""
        self._closing.set()
        self._sender.close()
        self._receiver.close()
        self._outbox.close()
        self._thread.join(_JOIN_S)
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _handle_messages(self) -> None:
        """Handle rank 0's messages until rank 0 exits: then this process is about to end."""
        try:
            while not self._closing.is_set():
                if self._channel.has_more(_POLL_S):
                    with self._receiving:
                        if self._channel.has_more(0):  # else a link's thread was faster
                            self._take(self._channel.receive(_SEND_S))
        except Exception as error:  # noqa: BLE001  the thread's outermost frame: a rank that no longer reads must end
            self._broken(error)

    def _broken(self, error: Exception) -> None:
        """Close the socket after a failed send or receive, so that rank 0 treats this rank as lost."""
        if self._closing.is_set():
            return
        if isinstance(error, ChannelClosed):
            _log.info("kv_rank_0_gone", error=error)
        else:
            _log.error("kv_rank_0_message_invalid", error)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _take(self, message: Message[RankMessage]) -> None:
        try:
            self._handle_message(message)
        except Exception as error:  # noqa: BLE001  a defect in one ticket must not block the others' messages
            _log.error("kv_rank_message_failed", error, kind=message.kind.name)

    def _handle_message(self, message: Message[RankMessage]) -> None:
        payload = message.payload
        match message.kind:
            case RankMessage.BEGIN:
                ticket = from_json(Ticket, payload)
                self._tables.begin(ticket.ticket_id)
                self._sender.begin(ticket)
            case RankMessage.PUT:
                ticket_id, (layer, start, end, marks, kept, *more) = unpack_numbers(payload, 5)
                blocks = self._tables.take(ticket_id, kept, more)
                if blocks is not None and self._await_marks(ticket_id, marks):
                    self._sender.put(ticket_id, layer, start, end, blocks)
            case RankMessage.COMMIT:
                ticket_id, description = unpack_bytes(payload)
                self._tables.end(ticket_id)
                self._sender.commit(ticket_id, description)
            case RankMessage.ABORT:
                ticket_id, reason = unpack_bytes(payload)
                self._abort(ticket_id, reason.decode())
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

    def _await_marks(self, ticket_id: str, count: int) -> bool:
        """Wait until this rank has launched the layer that rank 0 has reported; end the ticket on a timeout."""
        pool = device_memory(self._memory)
        if pool is None or pool.await_marks(count, _SEND_S):
            return True
        self._abort(ticket_id, f"a layer that rank 0 reported was not launched by another rank within {_SEND_S:g} s")
        return False

    def _abort(self, ticket_id: str, reason: str) -> None:
        self._tables.end(ticket_id)
        self._sender.abort(ticket_id, reason)

    def _close_half(self, half: KvSender | KvReceiver) -> None:
        half.close()
        self._send_counters()
        self._outbox.send(RankMessage.CLOSED)

    def _send_counters(self) -> None:
        sender, receiver = self._sender, self._receiver
        now = RankCounters(tuple(sender.links_of_ranks()), sender.bytes_sent, sender.frames_resent, receiver.counts)
        if now != self._sent_counters:
            self._sent_counters = now
            self._outbox.send(RankMessage.COUNTERS, to_json(now))


class _TicketEvents:
    """Implements SenderEvents: sends each event to rank 0, and forgets the ticket's table."""

    def __init__(self, send: Callable[[RankMessage, bytes], None], forget: Callable[[str], None]) -> None:
        self._send, self._forget = send, forget

    def acked(self, ticket_id: str, stats: SendStats) -> None:
        """See SenderEvents."""
        self._forget(ticket_id)
        self._send(RankMessage.ACKED, pack_bytes(ticket_id, to_json(stats)))

    def failed(self, ticket_id: str, error: PdserveError) -> None:
        """See SenderEvents."""
        self._forget(ticket_id)
        self._send(RankMessage.FAILED, pack_bytes(ticket_id, pack_error(error)))


class Reports:
    """Implements quorum.TicketLedger for a rank's receiver: reports to rank 0, and applies its decisions."""

    def __init__(self, send: Callable[[RankMessage, bytes], None], catch_up: Callable[[], bool]) -> None:
        self._send, self._catch_up = send, catch_up
        self._share: Shares | None = None
        self._others: dict[str, int] = {}  # progress of the other ranks, by ticket

    def catch_up(self) -> None:
        """See TicketLedger."""
        self._catch_up()

    def join(self, shares: Shares) -> None:
        """Set the shares to which rank 0's calls are passed."""
        self._share = shares

    def share_ready(self, rank: int, ticket_id: str, description: bytes, kv_bytes: int) -> None:
        """See ShareReports. The description is sent to rank 0 alone."""
        self._send(RankMessage.READY, pack_numbers(ticket_id, kv_bytes))

    def share_ended(self, ticket_id: str, error: PdserveError) -> None:
        """See ShareReports."""
        self._send(RankMessage.ENDED, pack_bytes(ticket_id, pack_error(error)))

    def share_released(self, ticket_id: str) -> None:
        """See ShareReports."""
        self._send(RankMessage.RELEASED, pack_numbers(ticket_id))

    def progress(self, ticket_id: str) -> int:
        """See ShareReports; the progress of the other ranks is what rank 0 replied to an earlier call."""
        share = self._share
        own = 0 if share is None else share.progress(ticket_id)
        self._send(RankMessage.PROGRESS, pack_numbers(ticket_id, own))
        return own + self._others.get(ticket_id, 0)

    def reserve(self, ticket_id: str, num_tokens: int, first_token: int, block_ids: Sequence[int]) -> NoReturn:
        """Raises InternalError: only rank 0 opens tickets."""
        raise InternalError(f"ticket {ticket_id} was requested from a rank other than 0, which opens none")

    def abort(self, ticket_id: str, reason: str) -> None:
        """Request that rank 0 end a ticket."""
        self.share_ended(ticket_id, HandoffFailed(reason))

    def close(self, reason: str) -> None:
        """Do nothing: only rank 0 ends tickets."""

    def take(self, message: Message[RankMessage]) -> None:
        """Apply rank 0's message about a ticket. Raises ValueError for a message that rank 0 does not send."""
        assert self._share is not None, "the receiver is made before messages are handled"
        if message.kind == RankMessage.RESERVE:
            ticket_id, (num_tokens, first_token, *blocks) = unpack_numbers(message.payload, 2)
            self._others[ticket_id] = 0
            try:
                self._share.reserve(ticket_id, num_tokens, first_token, blocks)
            except Exception as error:  # noqa: BLE001  any error: blocks that are not released are lost
                _log.error("kv_ticket_open_failed", error, ticket=ticket_id)
                self.share_ended(ticket_id, InternalError(f"a rank could not open its share of the ticket: {error}"))
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
            raise ValueError(f"rank 0 does not send {message.kind.name}")
