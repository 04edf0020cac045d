"""D's half of the hand-off: listens, owns the tickets, and runs each accepted connection on its own thread."""

import contextlib
import itertools
import math
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from kvtransfer import shm, tcp
from kvtransfer.connection_limit import MAX_INSIDE, MAX_WAITING, ConnectionLimit
from kvtransfer.device_memory import scratch_of
from kvtransfer.handshake import log_refusal
from kvtransfer.hello import Hello, check_hello
from kvtransfer.incoming import Incoming
from kvtransfer.interface import PoolMemory, ReceiverEvents
from kvtransfer.link_codec import encode
from kvtransfer.link_messages import Refuse, TicketMessage
from kvtransfer.quorum import Quorum, TicketLedger
from kvtransfer.rank_ends import RankReceiver
from kvtransfer.receiver_counts import ReceiverCounts
from kvtransfer.stream import Stream
from kvtransfer.ticket_table import TicketTable
from kvtransfer.transport_interface import Timeouts, Transport
from kvtransfer.transport_table import make_transports
from processes.failpoints import Failpoints, process_failpoints
from security.trust import Trust
from telemetry.capped_logs import CappedLog
from telemetry.logs import EventLogger
from wire.errors import Incompatible, Unavailable, to_name
from wire.types import KvEndpoint, Ticket

_log = EventLogger("kvtransfer")
_MAX_CONNECTIONS = MAX_INSIDE + 2 * MAX_WAITING  # includes displaced connections whose threads have not ended
_JOIN_S = 5.0
_SWEEP_S = 0.25  # counting a frame's bytes and expiring leases are each at most this late
_ACCEPT_PAUSE_S = 0.1


class KvReceiver:
    """One rank of D: owner of its listening sockets, its connections and its table of tickets.

    A single rank implements interface.Receiver; several ranks share one `quorum` (all_ranks.py).
    """

    def __init__(
        self, memory: PoolMemory, *, instance_id: str, epoch: int, host: str,
        transports: Sequence[str] = (), events: ReceiverEvents | None = None,
        clock: Callable[[], float] = time.monotonic, lease_s: float = 30.0,
        port_range: tuple[int, int] | None = None, progress_timeout_s: float = 10.0, digests: bool = True,
        trust: Trust | None = None, failpoints: Failpoints | None = None, quorum: TicketLedger | None = None,
        step_timeout_s: float = math.inf,
    ) -> None:  # fmt: skip
        """`step_timeout_s`: see Timeouts."""
        failpoints = failpoints or process_failpoints()
        if quorum is None:
            assert events is not None, "a single rank reports to its owner"
            quorum = Quorum(events, failpoints)
        self._quorum: TicketLedger = quorum
        self._memory, self._instance_id, self._epoch = memory, instance_id, epoch
        self._clock, self._lease_s, self._digests = clock, lease_s, digests
        self._trust = trust or Trust()
        self._timeouts = Timeouts(progress_s=progress_timeout_s, step_s=step_timeout_s)
        self._transports = make_transports(transports, memory, host=host)
        self._table = TicketTable(
            epoch=epoch, memory=memory, quorum=self._quorum, clock=clock, lease_s=lease_s,
            failpoints=failpoints, answer=self._answer,
        )  # fmt: skip
        self._quorum.join(self._table)
        self._links: dict[int, Incoming] = {}
        self._limit, self._refusals = ConnectionLimit(), CappedLog(_log)
        self._numbers = itertools.count(1)
        self._closing = threading.Event()
        traits = [transport.traits for transport in self._transports]
        self._listeners = {unix: _listen(unix, host, port_range) for unix in {one.one_host for one in traits}}
        self._endpoints = tuple(
            KvEndpoint(
                one.name, self._listeners[one.one_host][1], shm.host_id() if one.one_host else "",
                memory.layout.rank.number,
            )
            for one in traits
        )  # fmt: skip
        self._threads = [
            threading.Thread(target=self._accept, name="kv-accept", daemon=True),
            threading.Thread(target=self._sweep_often, name="kv-sweep", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def endpoints(self) -> tuple[KvEndpoint, ...]:
        """Endpoints at which senders reach it, best first."""
        return self._endpoints

    @property
    def counts(self) -> ReceiverCounts:
        """Counts of what was received so far."""
        return self._table.counts

    @property
    def bytes_received(self) -> int:
        """KV bytes copied into the pool."""
        return self._table.counts.bytes_received

    def open(self, ticket_id: str, *, num_tokens: int, first_token: int, block_ids: Sequence[int]) -> Ticket:
        """Open a ticket whose frames are written to `block_ids`. Raises ValueError, Unavailable: see Quorum.reserve."""
        self._quorum.reserve(ticket_id, num_tokens, first_token, block_ids)
        return Ticket(
            ticket_id=ticket_id, epoch=self._epoch, instance_id=self._instance_id, num_tokens=num_tokens,
            first_token=first_token, lease_s=self._lease_s, endpoints=self.endpoints,
        )  # fmt: skip

    def abort(self, ticket_id: str, reason: str) -> None:
        """End a ticket and notify its sender, if any. Does nothing if it has ended or is being committed."""
        self._quorum.abort(ticket_id, reason)

    def sweep(self, now: float | None = None) -> None:
        """End the tickets whose lease has expired; a thread does this periodically."""
        self._table.sweep(self._clock() if now is None else now)

    def close(self) -> None:
        """Abort everything, stop listening, join the threads."""
        close_receivers([self])

    def end(self) -> list[threading.Thread]:
        """Abort everything; return the accepting and sweeping threads, which are about to end."""
        self._closing.set()
        self._quorum.close("the receiver is shutting down")
        for sock, _ in self._listeners.values():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        return self._threads

    def end_links(self) -> list[threading.Thread]:
        """Close listeners and connections, once no more are accepted; return the threads, which are about to end."""
        for sock, _ in self._listeners.values():
            sock.close()
        links = list(self._links.values())
        for link in links:
            link.shutdown()
        return [link.thread for link in links]

    def _accept(self) -> None:
        poll = select.poll()
        by_fd = {sock.fileno(): (sock, over_unix) for over_unix, (sock, _) in self._listeners.items()}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        while not self._closing.is_set():
            for fd, _ in poll.poll(1000):
                self._accept_one(*by_fd[fd])

    def _accept_one(self, listener: socket.socket, over_unix: bool) -> None:
        try:
            sock, address = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no free descriptor, for example: retry later
            if self._closing.is_set():
                return
            self._refusals.warning("kv_accept_failed", "kv_accept_failed", unix=over_unix, error=error)
            self._closing.wait(_ACCEPT_PAUSE_S)
            return
        try:
            self._take(sock, None if over_unix else str(address[0]))
        except Exception as error:  # noqa: BLE001  the accepting thread's outermost frame: keep accepting
            _log.error("kv_accept_failed", error, unix=over_unix)
            self._table.count(refused_connections=1)
            sock.close()

    def _take(self, sock: socket.socket, address: str | None) -> None:
        """Start a connection's thread; `address` is None for a Unix socket."""
        full = len(self._links) >= _MAX_CONNECTIONS or self._closing.is_set()
        if full or not self._may_connect(sock, address):
            self._table.count(refused_connections=1)
            sock.close()
            return
        if address is not None:
            tcp.tune(sock, self._timeouts.progress_s)
        stream = Stream(sock, progress_timeout_s=self._timeouts.progress_s)
        number = next(self._numbers)
        incoming = Incoming(
            number, stream, self._table, choose=lambda hello: self._choose(number, hello, over_unix=address is None),
            timeouts=self._timeouts, trust=self._trust, digests=self._digests, ended=self._remove_link,
            refusals=self._refusals, make_scratch=partial(scratch_of, self._memory),
        )  # fmt: skip
        self._links[number] = incoming
        try:
            self._limit.wait(number, address, incoming.shutdown)
            incoming.thread.start()
        except BaseException:
            self._remove_link(number)
            raise

    def _may_connect(self, sock: socket.socket, address: str | None) -> bool:
        """Check cheaply whether the peer may start the handshake, which checks it again (proof.check_peer)."""
        if address is None:
            return shm.is_same_user(sock)
        try:
            self._trust.check_address(address)
        except Incompatible as error:
            log_refusal(self._refusals, error)
            with contextlib.suppress(OSError):  # send the reason if the socket takes it: do not wait
                sock.setblocking(False)
                sock.send(encode(Refuse(to_name(error), str(error))))
                sock.shutdown(socket.SHUT_WR)
            return False
        return True

    def _choose(self, number: int, hello: Hello, *, over_unix: bool) -> Transport:
        """Check the proven sender, admit its connection and return the transport that HELLO names.

        Raises a PdserveError with a message.
        """
        check_hello(hello, instance_id=self._instance_id, epoch=self._epoch, layout=self._memory.layout)
        self._limit.enter(number)
        for transport in self._transports:
            if (transport.traits.name, transport.traits.one_host) == (hello.transport, over_unix):
                return transport
        raise Unavailable(f"KV transport {hello.transport!r} is not offered here")

    def _remove_link(self, number: int) -> None:
        self._links.pop(number, None)
        self._limit.leave(number)

    def _answer(self, number: int, message: TicketMessage) -> None:
        link = self._links.get(number)
        if link is not None:
            link.answer(encode(message))

    def _sweep_often(self) -> None:
        while not self._closing.wait(min(_SWEEP_S, self._lease_s / 4)):
            try:
                self.sweep()
            except Exception as error:  # noqa: BLE001  the outermost frame of the sweeper's thread
                _log.error("kv_sweep_failed", error)


def close_receivers(receivers: Sequence[RankReceiver]) -> None:
    """Close all ranks and join their threads together."""
    _join([thread for receiver in receivers for thread in receiver.end()])
    _join([thread for receiver in receivers for thread in receiver.end_links()])


def _join(threads: Sequence[threading.Thread]) -> None:
    until = time.monotonic() + _JOIN_S
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
        if thread.is_alive():
            _log.warning("kv_thread_still_running", thread=thread.name)


def _listen(over_unix: bool, host: str, port_range: tuple[int, int] | None) -> tuple[socket.socket, str]:
    sock, address = shm.listen() if over_unix else tcp.listen(host, port_range)
    sock.setblocking(False)
    return sock, address
