"""A real transport that a test can break and repair: refuses, delays or cuts its connections."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvtransfer.hello import Hello
from kvtransfer.stream import Stream
from kvtransfer.transport_interface import Inlet, Outlet, Timeouts, Transport
from kvtransfer.transport_table import make_transports
from tests.kvtransfer.rig import DEADLINE_S, Rig, make_rig, until
from wire.types import KvEndpoint, Ticket

BOTH = ("shm", "tcp")
BLOCKS = (1, 2, 3, 4, 5)


class FaultyTransport:
    """Implements transport.Transport by another one, as long as nothing is broken."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.traits = inner.traits
        self.refuses = False
        self.free = threading.Event()  # cleared: a connection waits here
        self.free.set()
        self.waiting = threading.Event()
        self.num_connects = 0
        self._streams: list[Stream] = []

    def cut(self) -> None:
        """Cut every connection."""
        for stream in self._streams:
            stream.shutdown()

    def unusable(self) -> str | None:
        return self._inner.unusable()

    def bind(self, host: str | None, source: str | None) -> None:
        self._inner.bind(host, source)

    def unreachable(self, endpoint: KvEndpoint) -> str | None:
        return self._inner.unreachable(endpoint)

    def connect(self, endpoint: KvEndpoint, timeouts: Timeouts) -> Stream:
        self.num_connects += 1
        if not self.free.is_set():
            self.waiting.set()
            assert self.free.wait(DEADLINE_S)
        if self.refuses:
            raise ConnectionRefusedError(f"the test refuses {self.traits.name}")
        stream = self._inner.connect(endpoint, timeouts)
        self._streams.append(stream)
        return stream

    def outlet(self, stream: Stream, hello: Hello, timeouts: Timeouts) -> Outlet:
        return self._inner.outlet(stream, hello, timeouts)

    def inlet(self, stream: Stream, hello: Hello, timeouts: Timeouts) -> Inlet:
        return self._inner.inlet(stream, hello, timeouts)


@contextmanager
def faulty_rig(
    patch: pytest.MonkeyPatch, names: tuple[str, ...] = BOTH, **settings: object
) -> Iterator[tuple[Rig, dict[str, FaultyTransport]]]:
    """A rig whose sender's transports can be broken, by name; its clock stands until it is set."""
    made: dict[str, FaultyTransport] = {}

    def make(*args: object, **options: object) -> tuple[FaultyTransport, ...]:
        made.update({one.traits.name: FaultyTransport(one) for one in make_transports(*args, **options)})  # type: ignore[arg-type]
        return tuple(made.values())

    patch.setattr("kvtransfer.sender.make_transports", make)
    with make_rig(names[0], sender_transports=names, receiver_transports=names, **settings) as rig:
        try:
            yield rig, made
        finally:
            for transport in made.values():
                transport.free.set()


def hand_over(rig: Rig, first_block: int = 1) -> str:
    """Hand off a prompt of 20 tokens and return the transport that it went over."""
    ticket = rig.open(20, range(first_block, first_block + 5))
    rig.hand_over(ticket, range(first_block, first_block + 5))
    rig.events.wait("acked", ticket.ticket_id)
    return rig.events.acks[ticket.ticket_id].transport


def begin_half(rig: Rig, first_block: int = 10) -> Ticket:
    """Begin a prompt of 20 tokens and put 8 of them, which arrive."""
    ticket, before = rig.open(20, range(first_block, first_block + 5)), rig.receiver.bytes_received
    rig.sender.begin(ticket)
    rig.put_all(ticket, range(first_block, first_block + 5), 0, 8)
    wanted = before + 8 * rig.p_pool.layout.token_bytes
    until(lambda: rig.receiver.bytes_received >= wanted)
    return ticket


def finish(rig: Rig, ticket: Ticket, first_block: int = 10) -> str:
    """Put the rest, commit, and return the transport."""
    rig.put_all(ticket, range(first_block, first_block + 5))
    rig.sender.commit(ticket.ticket_id, b"")
    rig.events.wait("acked", ticket.ticket_id)
    return rig.events.acks[ticket.ticket_id].transport
