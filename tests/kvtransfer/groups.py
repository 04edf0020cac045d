"""Links over process_group without the rest of the hand-off: both ends in this process, over loopback TCP."""

import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch

from devices.collectives import COLLECTIVES
from kvtransfer.digest import Region, RegionRuns, Runs, StopFlag, digest_of
from kvtransfer.hello import Hello
from kvtransfer.link_messages import Frame
from kvtransfer.process_group.exchange import SetupExchange, SetupKind
from kvtransfer.process_group.group_setup import RECEIVER, SENDER, group_name
from kvtransfer.process_group.link_ends import GroupInlet, GroupOutlet
from kvtransfer.process_group.store import LinkStore
from kvtransfer.process_group.transport import ProcessGroupTransport
from kvtransfer.stream import Stream
from kvtransfer.transport_interface import Timeouts
from native.ticker import run_time
from tests.kvtransfer.rig import DEADLINE_S, TENSORS, Pool, fill, make_rig, read
from wire.kv_layout import PoolLayout
from wire.types import PROTOCOL_VERSION

LAYOUT = PoolLayout(TENSORS, num_blocks=4, block_size=4)
NEVER = StopFlag()
_THREADS = ("kv-group", "kv-issue", "kv-set-up")
_End = TypeVar("_End", GroupOutlet, GroupInlet)


class DevicePool(Pool):
    """A pool of host memory that reports that it lies on a device."""

    def __init__(self, device: str) -> None:
        super().__init__(LAYOUT)
        self.device = device


def pools_on(kind: str) -> type[Pool]:
    """Return a factory of the rig's pools, each of which reports its own device."""
    numbers = itertools.count()

    class OneADevice(Pool):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)  # type: ignore[arg-type]
            self.device = f"{kind}:{next(numbers)}"

    return OneADevice


def hand_over_many() -> None:
    """Hand off 32 prompts over one link, all at once; each has its own bytes."""
    with make_rig("process_group", num_blocks=256) as rig:
        tokens = [fill(rig.p_pool, range(4 * i, 4 * i + 4), 15, seed=i) for i in range(32)]
        tickets = [rig.open(15, range(252 - 4 * i, 256 - 4 * i)) for i in range(32)]
        for i, ticket in enumerate(tickets):
            rig.hand_over(ticket, range(4 * i, 4 * i + 4))
        for ticket in tickets:
            rig.events.wait("acked", ticket.ticket_id)

        assert all(read(rig.d_pool, range(252 - 4 * i, 256 - 4 * i), 15) == tokens[i] for i in range(32))


@dataclass
class Node:
    """One instance: a pool and the transport over it."""

    name: str
    pool: Pool
    transport: ProcessGroupTransport


def make_node(name: str, device: str | None = None) -> Node:
    pool = Pool(LAYOUT) if device is None else DevicePool(device)
    return Node(name, pool, ProcessGroupTransport(pool))


@dataclass
class Ends:
    """Both ends of one link."""

    outlet: GroupOutlet
    inlet: GroupInlet
    streams: tuple[Stream, Stream]

    def send(self, payload: bytes, number: int = 0) -> Frame:
        """Announce `payload`; the header that would cross is returned."""
        frame = frame_of(payload, number)
        self.outlet.announce(frame, place_of(bytearray(payload)))
        return frame

    def fill(self, num_bytes: int, frames: int) -> None:
        """Announce frames that nobody receives. Raises LinkLost."""
        for number in range(frames):
            self.send(bytes(num_bytes), number)

    def receive(self, frame: Frame) -> bytes:
        """Move a frame into memory of its own; its digest is checked."""
        target = bytearray(frame.num_bytes)
        assert self.inlet.move(frame, place_of(target), NEVER) == frame.digest
        return bytes(target)

    def close(self) -> None:
        for stream in self.streams:
            stream.shutdown()
        self.outlet.close()
        self.inlet.close()
        for stream in self.streams:
            stream.close()


def frame_of(payload: bytes, number: int = 0) -> Frame:
    return Frame("ab" * 16, 1, number, 0, 0, 0, 1, 0, 2, len(payload), digest_of([payload]))


def place_of(memory: bytearray) -> RegionRuns:
    return RegionRuns(Region(memory), 0, Runs([(0, len(memory), 0, 1)]))


def hello_of(sender: Node, receiver: Node, link_epoch: int = 1) -> Hello:
    return Hello(
        PROTOCOL_VERSION, sender.name, 5, link_epoch, receiver.name, 5, "process_group", 4, 4, TENSORS,
        nonce=link_epoch.to_bytes(16, "big"),
    )  # fmt: skip


def stream_pair(progress_s: float) -> tuple[Stream, Stream]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        two, _ = listener.accept()
    return Stream(one, progress_timeout_s=progress_s), Stream(two, progress_timeout_s=progress_s)


def link(sender: Node, receiver: Node, link_epoch: int = 1, timeouts: Timeouts | None = None) -> Ends:
    """Set up a link, both ends at once. Raises what the receiver raised, else what the sender did."""
    timeouts = timeouts or Timeouts(5.0, DEADLINE_S)
    streams, hello = stream_pair(timeouts.progress_s), hello_of(sender, receiver, link_epoch)
    with ThreadPoolExecutor(2) as threads:
        outlet = threads.submit(_cut_on_error, sender.transport.outlet, streams[0], hello, timeouts)
        inlet = threads.submit(_cut_on_error, receiver.transport.inlet, streams[1], hello, timeouts)
        failure = inlet.exception(DEADLINE_S) or outlet.exception(DEADLINE_S)
    if failure is not None:
        for end in [one.result() for one in (inlet, outlet) if one.exception() is None]:
            end.close()
        for stream in streams:
            stream.close()
        raise failure
    return Ends(outlet.result(), inlet.result(), streams)


def _cut_on_error(
    make: Callable[[Stream, Hello, Timeouts], _End], stream: Stream, hello: Hello, timeouts: Timeouts
) -> _End:
    try:
        return make(stream, hello, timeouts)
    except BaseException:
        stream.shutdown()
        raise


@contextmanager
def linked(sender: Node, receiver: Node, link_epoch: int = 1, timeouts: Timeouts | None = None) -> Iterator[Ends]:
    ends = link(sender, receiver, link_epoch, timeouts)
    try:
        yield ends
    finally:
        ends.close()


@contextmanager
def stopping(sender: Node, silent: Node, timeouts: Timeouts, *, proves: bool) -> "Iterator[Future[GroupOutlet]]":
    """A sender's end that is being set up with a peer that falls silent once it has made its group; closed on exit.

    `proves`: it still receives the proof. The sender is to lead.
    """
    streams, hello = stream_pair(DEADLINE_S), hello_of(sender, silent, 7)
    exchange = SetupExchange(streams[1], group_name(hello))
    exchange.deadline = run_time() + DEADLINE_S
    with ThreadPoolExecutor(1) as makers:
        made = makers.submit(sender.transport.outlet, streams[0], hello, timeouts)
        try:
            exchange.receive([SetupKind.TERMS], DEADLINE_S)
            exchange.receive([SetupKind.TURN], DEADLINE_S)
            exchange.send(SetupKind.GRANTED)
            group: Any = COLLECTIVES["gloo"].make(LinkStore(exchange), RECEIVER, 2, "127.0.0.1", DEADLINE_S, "cpu")
            if proves:
                group.recv([torch.empty(16, dtype=torch.uint8)], SENDER, 0).wait(timedelta(seconds=DEADLINE_S))
            yield made
        finally:
            group = None
            for stream in streams:
                stream.shutdown()
            made.exception(DEADLINE_S)
            for stream in streams:
                stream.close()


def limit_progress(ends: Ends, progress_s: float) -> None:
    """From now on either end gives up after this long without progress: setting up the link had more time."""
    for end in (ends.outlet, ends.inlet):
        group: Any = end._group
        group._timeouts = Timeouts(progress_s=progress_s)  # group.py
        group._operation_s = end._waiter._progress_s = progress_s  # remote_group.py


def group_threads() -> list[str]:
    """The threads that links over groups left running."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(_THREADS)]
