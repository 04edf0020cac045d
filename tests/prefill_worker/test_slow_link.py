"""One sender, two receivers, real sockets: a stalled link delays its own hand-offs only."""

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

from kvtransfer.receiver import KvReceiver
from tests.kvtransfer.rig import DEADLINE_S, Pool, Recorder, Rig, fill, make_rig, read
from wire.kv_layout import KvTensor, PoolLayout
from wire.types import KvEndpoint, Ticket

TENSORS = tuple(KvTensor(0, name, 8, 64, "float32") for name in ("k", "v"))
NUM_BLOCKS = 2048  # of 4 tokens of 4 KiB: 32 MiB, more than the sockets of a stalled link take
NUM_TOKENS = 4 * NUM_BLOCKS
LET_THROUGH = 1 << 20


class Gate:
    """A proxy to a listener that stops reading after a megabyte until it is opened."""

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.stalled, self.open = threading.Event(), threading.Event()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._serve, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        """Close the proxied connections."""
        self.open.set()
        self._listener.close()
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(DEADLINE_S)
        for one in self._sockets:
            one.close()

    def _serve(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(self._target)
        self._sockets += [near, far]
        back = threading.Thread(target=self._forward, args=(far, near, None), daemon=True)
        self._threads.append(back)
        back.start()
        self._forward(near, far, LET_THROUGH)

    def _forward(self, source: socket.socket, target: socket.socket, room: int | None) -> None:
        with contextlib.suppress(OSError):
            while part := source.recv(1 << 16):
                target.sendall(part)
                if room is not None and (room := room - len(part)) <= 0:
                    self.stalled.set()
                    self.open.wait(DEADLINE_S)
                    room = None


@contextmanager
def another_receiver(rig: Rig) -> Iterator[tuple[KvReceiver, Pool, Recorder]]:
    """A second receiver that the rig's sender can reach."""
    pool, events = Pool(PoolLayout(TENSORS, num_blocks=NUM_BLOCKS, block_size=4)), Recorder()
    receiver = KvReceiver(
        pool, instance_id="decode-1", epoch=78, host="127.0.0.1", transports=("tcp",), events=events, clock=rig.clock
    )
    try:
        yield receiver, pool, events
    finally:
        receiver.close()
        pool.close()


def through(gate: Gate, ticket: Ticket) -> Ticket:
    """Return the ticket with the gate as its receiver's address."""
    return dataclasses.replace(ticket, endpoints=(KvEndpoint("tcp", gate.address),))


def test_hand_offs_of_other_links_pass_while_one_link_stalls() -> None:
    everything = tuple(range(NUM_BLOCKS))
    with (
        make_rig("tcp", tensors=TENSORS, num_blocks=NUM_BLOCKS, lease_s=600.0) as rig,
        another_receiver(rig) as (quick, pool, events),
    ):
        tokens = fill(rig.p_pool, everything[:16], 64)
        ticket = rig.open(NUM_TOKENS, everything)
        with closing(Gate(ticket.endpoints[0].address)) as gate:
            rig.hand_over(through(gate, ticket), everything)
            assert gate.stalled.wait(DEADLINE_S)
            for number in range(20):
                other = quick.open(f"{number:032x}", num_tokens=64, first_token=0, block_ids=everything[:16])
                rig.hand_over(other, everything[:16])
                rig.events.wait("acked", other.ticket_id)

            assert events.count("committed") == 20
            assert read(pool, everything[:16], 64) == tokens
            assert (rig.events.count("acked"), rig.events.count("failed")) == (20, 0)
            gate.open.set()
            rig.events.wait("acked", ticket.ticket_id)
        assert read(rig.d_pool, everything[:16], 64) == tokens
