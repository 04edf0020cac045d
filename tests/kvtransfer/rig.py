"""Two pools, a sender and a receiver in one process, over real sockets; and what tests do with them."""

import fcntl
import mmap
import os
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvtransfer.dial import dial
from kvtransfer.digest import Region, RegionRuns, digest_of
from kvtransfer.hello import Hello
from kvtransfer.interface import SendStats
from kvtransfer.link_codec import decode, encode
from kvtransfer.link_messages import Frame, MessageType, Renew, Taken, TicketMessage
from kvtransfer.receiver import KvReceiver
from kvtransfer.sender import KvSender
from kvtransfer.shm import POOL_SEALS
from kvtransfer.staging import whole
from kvtransfer.transport_interface import Outlet, Timeouts
from kvtransfer.transport_table import make_transports
from processes.failpoints import Failpoints
from wire.errors import PdserveError
from wire.kv_layout import KvTensor, PoolLayout
from wire.types import PROTOCOL_VERSION, KvEndpoint, Ticket

DEADLINE_S = 300.0
TENSORS = tuple(KvTensor(layer, name, 2, 8, "float32") for layer in range(3) for name in ("k", "v"))
Tokens = dict[int, bytes]


class Pool:
    """A memfd pool; `seals` may leave some out."""

    def __init__(self, layout: PoolLayout, seals: int = POOL_SEALS) -> None:
        self.layout = layout
        self._fd = os.memfd_create("test-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, layout.total_bytes)
        self._map = mmap.mmap(self._fd, layout.total_bytes)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, seals)
        self._buffer = memoryview(self._map)

    @property
    def fd(self) -> int | None:
        return self._fd

    @property
    def buffer(self) -> memoryview:
        return self._buffer

    def close(self) -> None:
        os.close(self._fd)


def address(layout: PoolLayout, tensor: int, block_ids: Sequence[int], token: int) -> slice:
    """Return the place of one token by the layout's drawing, without PoolLayout.runs."""
    size = layout.tensors[tensor].heads * layout.tensors[tensor].head_dim * 4
    slot = block_ids[token // layout.block_size] * layout.block_size + token % layout.block_size
    return slice(layout.offsets[tensor] + slot * size, layout.offsets[tensor] + (slot + 1) * size)


def fill(pool: Pool, block_ids: Sequence[int], num_tokens: int, seed: int = 0) -> Tokens:
    """Write random tokens into the blocks and return each tensor's bytes."""
    source, tokens = random.Random(seed), {}
    for tensor, spec in enumerate(pool.layout.tensors):
        size = spec.heads * spec.head_dim * 4
        tokens[tensor] = source.randbytes(num_tokens * size)
        for token in range(num_tokens):
            where = address(pool.layout, tensor, block_ids, token)
            pool.buffer[where] = tokens[tensor][token * size : (token + 1) * size]
    return tokens


def read(pool: Pool, block_ids: Sequence[int], num_tokens: int) -> Tokens:
    """Return each tensor's bytes of the tokens in the blocks."""
    return {
        tensor: b"".join(
            bytes(pool.buffer[address(pool.layout, tensor, block_ids, token)]) for token in range(num_tokens)
        )
        for tensor in range(len(pool.layout.tensors))
    }


@dataclass
class Recorder:
    """What sender and receiver reported; `refusal` is raised by `committed`."""

    acks: dict[str, SendStats] = field(default_factory=dict)
    failures: dict[str, PdserveError] = field(default_factory=dict)
    commits: dict[str, tuple[bytes, tuple[int, ...], int]] = field(default_factory=dict)
    ends: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    reports: list[tuple[str, str]] = field(default_factory=list)
    refusal: Exception | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)

    def acked(self, ticket_id: str, stats: SendStats) -> None:
        self._report("acked", ticket_id, lambda: self.acks.update({ticket_id: stats}))

    def failed(self, ticket_id: str, error: PdserveError) -> None:
        self._report("failed", ticket_id, lambda: self.failures.update({ticket_id: error}))

    def committed(self, ticket_id: str, description: bytes, block_ids: tuple[int, ...], kv_bytes: int) -> None:
        if self.refusal is not None:
            raise self.refusal
        commit = (description, block_ids, kv_bytes)
        self._report("committed", ticket_id, lambda: self.commits.update({ticket_id: commit}))

    def ended(self, ticket_id: str, block_ids: tuple[int, ...], reason: str) -> None:
        self._report("ended", ticket_id, lambda: self.ends.update({ticket_id: (block_ids, reason)}))

    def _report(self, kind: str, ticket_id: str, store: Callable[[], None]) -> None:
        with self.changed:
            self.reports.append((kind, ticket_id))
            store()
            self.changed.notify_all()

    def count(self, kind: str) -> int:
        return sum(one == kind for one, _ in self.reports)

    def wait(self, kind: str, ticket_id: str) -> None:
        """Wait until the report came."""
        with self.changed:
            assert self.changed.wait_for(lambda: (kind, ticket_id) in self.reports, DEADLINE_S), self.reports


class Clock:
    """A clock that stands until it is set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """One sender, one receiver, one transport."""

    def __init__(
        self, transport: str, *, sender_block: int = 4, receiver_block: int = 4, num_blocks: int = 64,
        failpoints: str = "", lease_s: float = 30.0, sender_seals: int = POOL_SEALS,
        sender_tensors: Sequence[KvTensor] = TENSORS, sender_transports: Sequence[str] | None = None,
        receiver_transports: Sequence[str] | None = None, progress_timeout_s: float = 10.0,
        tensors: Sequence[KvTensor] = TENSORS, digests: bool = True, clocks_apart: bool = False,
    ) -> None:  # fmt: skip
        self.transport, self.clock, self.progress_age = transport, Clock(), 0.0
        self.sender_clock, self.digests = Clock() if clocks_apart else self.clock, digests
        sender_tensors = tensors if sender_tensors is TENSORS else sender_tensors
        self.p_pool = Pool(PoolLayout(sender_tensors, num_blocks=num_blocks, block_size=sender_block), sender_seals)
        self.d_pool = Pool(PoolLayout(tensors, num_blocks=num_blocks, block_size=receiver_block))
        self.events, points = Recorder(), Failpoints.parse(failpoints)
        self.outlets: list[Outlet] = []  # of raw senders, which nobody else closes
        self.receiver = KvReceiver(
            self.d_pool, instance_id="decode-0", epoch=77, host="127.0.0.1", failpoints=points, lease_s=lease_s,
            transports=receiver_transports or (transport,), events=self.events, clock=self.clock,
            progress_timeout_s=progress_timeout_s, digests=digests,
        )  # fmt: skip
        self.sender = KvSender(
            self.p_pool, instance_id="prefill-0", epoch=55, transports=sender_transports or (transport,),
            events=self.events, clock=self.sender_clock, progress_age=lambda: self.progress_age, failpoints=points,
            connect_timeout_s=20.0, progress_timeout_s=progress_timeout_s, check_interval_s=0.05, digests=digests,
        )  # fmt: skip

    def open(self, num_tokens: int, block_ids: Sequence[int], first_token: int = 0) -> Ticket:
        return self.receiver.open(
            secrets.token_hex(16), num_tokens=num_tokens, first_token=first_token, block_ids=block_ids
        )

    def put_all(self, ticket: Ticket, block_ids: Sequence[int], start: int = 0, end: int | None = None) -> None:
        for layer in range(self.p_pool.layout.num_layers):
            self.sender.put(ticket.ticket_id, layer, start, ticket.num_tokens if end is None else end, block_ids)

    def hand_over(self, ticket: Ticket, block_ids: Sequence[int], description: bytes = b"prompt") -> None:
        self.sender.begin(ticket)
        self.put_all(ticket, block_ids)
        self.sender.commit(ticket.ticket_id, description)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        for outlet in self.outlets:
            outlet.close()
        self.p_pool.close()
        self.d_pool.close()


@contextmanager
def make_rig(transport: str, **settings: object) -> Iterator[Rig]:
    rig = Rig(transport, **settings)  # type: ignore[arg-type]
    try:
        yield rig
    finally:
        rig.close()


class RawSender:
    """A sender made by hand, which sends whatever a test wants."""

    def __init__(self, rig: Rig, link_epoch: int = 9) -> None:
        self._rig, layout = rig, rig.p_pool.layout
        hello = Hello(
            PROTOCOL_VERSION, "raw", 5, link_epoch, "decode-0", 77, "", layout.block_size, layout.num_blocks,
            layout.tensors, digests=rig.digests,
        )  # fmt: skip
        dialled = dial(
            make_transports((rig.transport,), rig.p_pool), rig.receiver.endpoints, hello, Timeouts(5, DEADLINE_S)
        )
        self.stream, self._outlet = dialled.stream, dialled.outlet
        rig.outlets.append(self._outlet)

    def say(self, message: TicketMessage) -> None:
        self.stream.send([encode(message)])

    def announce(self, frame: Frame, payload: bytes) -> None:
        self.stream.send(self._outlet.announce(frame, RegionRuns(Region(payload), 0, whole(len(payload)))))

    def receive(self) -> TicketMessage:
        while True:
            kind, body = self.stream.receive_message(first_byte_s=DEADLINE_S)
            message = decode(kind, body)
            assert kind is not MessageType.REFUSE
            if isinstance(message, Taken):
                self._outlet.taken(message)
            elif not isinstance(message, Renew):
                return message  # type: ignore[return-value]

    def frame(self, ticket: Ticket, number: int, tensor: int, tokens: Tokens, /, **changes: int) -> tuple[Frame, bytes]:
        """A frame of all tokens of one tensor, whose blocks are 0, 1, ..."""
        spec, size = self._rig.p_pool.layout.tensors[tensor], self._rig.p_pool.layout.block_size
        fields: dict[str, int] = {
            "epoch": ticket.epoch, "number": number, "layer": spec.layer, "tensor": tensor, "start": 0,
            "end": ticket.num_tokens, "head_start": 0, "head_end": spec.heads, "num_bytes": len(tokens[tensor]),
            "digest": digest_of([tokens[tensor]]) if self._rig.digests else 0,
        }  # fmt: skip
        fields.update(changes)
        blocks = tuple(range(-(-ticket.num_tokens // size)))
        return Frame(ticket_id=ticket.ticket_id, block_ids=blocks, **fields), tokens[tensor]


def endpoint_of(rig: Rig, transport: str) -> KvEndpoint:
    return next(endpoint for endpoint in rig.receiver.endpoints if endpoint.transport == transport)


def until(condition: Callable[[], bool]) -> None:
    """Poll for what no event reports."""
    deadline, event = time.monotonic() + DEADLINE_S, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "the condition never came"
        event.wait(0.005)
