"""Many tickets at once over links that are cut and drained, some dropped on either side: each ends once, correctly."""

import random
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from queue import SimpleQueue

import pytest

from tests.kvtransfer.rig import DEADLINE_S, Rig, Tokens, fill, make_rig, read, until
from wire.errors import InternalError, PdserveError

NUM_TOKENS, NUM_BLOCKS, NUM_THREADS = 8, 64, 3
Blocks = tuple[int, int]


class Traffic:
    """Owner of the blocks on both sides: P's belong to another prompt as soon as they are released."""

    def __init__(self, rig: Rig, per_thread: int) -> None:
        self._rig, self._per_thread = rig, per_thread
        self._free: dict[str, SimpleQueue[Blocks]] = {"p": SimpleQueue(), "d": SimpleQueue()}
        for first in range(0, NUM_BLOCKS, 2):
            for free in self._free.values():
                free.put((first, first + 1))
        self._kv: dict[str, Tokens] = {}
        self._held: dict[str, Blocks] = {}
        self.dropped: set[str] = set()
        self.wrong: list[str] = []
        self._committed, self._ended = rig.events.committed, rig.events.ended
        self._failed, self._report = rig.events.failed, rig.events._report
        for name in ("committed", "ended", "failed", "acked"):
            setattr(rig.events, name, getattr(self, name))

    def committed(self, ticket_id: str, description: bytes, block_ids: Blocks, kv_bytes: int) -> None:
        if read(self._rig.d_pool, block_ids, NUM_TOKENS) != self._kv[ticket_id]:
            self.wrong.append(ticket_id)
        self._committed(ticket_id, description, block_ids, kv_bytes)
        self._free["d"].put(block_ids)

    def ended(self, ticket_id: str, block_ids: Blocks, reason: str) -> None:
        self._ended(ticket_id, block_ids, reason)
        self._free["d"].put(block_ids)

    def acked(self, ticket_id: str, stats: object) -> None:
        self._report("acked", ticket_id, lambda: None)
        self._give_back(ticket_id)

    def failed(self, ticket_id: str, error: PdserveError) -> None:
        self._failed(ticket_id, error)
        self._give_back(ticket_id)

    def run(self, seed: int) -> None:
        """Hand off prompts from several threads, with disturbances until they are done."""
        threads = [
            threading.Thread(target=self._hand_over_all, args=(10 * seed + number,)) for number in range(NUM_THREADS)
        ]
        source, pause = random.Random(seed), threading.Event()
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            pause.wait(0.02 * source.random())
            self._inject_fault(source)
        until(self._is_over)

    def _hand_over_all(self, seed: int) -> None:
        source = random.Random(seed)
        for number in range(self._per_thread):
            self._hand_over(source.random(), 10_000 * seed + number)

    def _hand_over(self, what: float, seed: int) -> None:
        rig, blocks = self._rig, self._free["p"].get(timeout=DEADLINE_S)
        tokens = fill(rig.p_pool, blocks, NUM_TOKENS, seed)
        ticket = rig.open(NUM_TOKENS, self._free["d"].get(timeout=DEADLINE_S))
        self._kv[ticket.ticket_id], self._held[ticket.ticket_id] = tokens, blocks
        rig.sender.begin(ticket)
        rig.put_all(ticket, blocks)
        if what > 0.1:
            rig.sender.commit(ticket.ticket_id, b"prompt")
        if what < 0.35:
            self.dropped.add(ticket.ticket_id)
            rig.sender.abort(ticket.ticket_id, "the client went away")
            self._give_back(ticket.ticket_id)
        elif what < 0.45:
            rig.receiver.abort(ticket.ticket_id, "cancelled here")

    def _give_back(self, ticket_id: str) -> None:
        blocks = self._held.pop(ticket_id, None)
        if blocks is not None:
            fill(self._rig.p_pool, blocks, NUM_TOKENS, seed=-1)
            self._free["p"].put(blocks)

    def _inject_fault(self, source: random.Random) -> None:
        rig, what = self._rig, source.random()
        rig.clock.now += 0.2  # what never came to the receiver ends there by its lease
        if what < 0.3:
            for incoming in list(rig.receiver._links.values())[:1]:
                incoming.shutdown()
        elif what < 0.6:
            for link in [link for peer in list(rig.sender._peers.values()) for link in peer.links()][:1]:
                link.drain()
        else:
            rig.sender.links()

    def _is_over(self) -> bool:
        self._rig.clock.now += 1.0
        self._rig.receiver.sweep()
        ends = Counter(self._rig.events.reports)
        here = {one for one in self._kv if ends["committed", one] + ends["ended", one] == 1}
        there = {one for one in self._kv if ends["acked", one] + ends["failed", one] == 1}
        return here == there | self.dropped == set(self._kv)


@pytest.fixture
def restless() -> Iterator[None]:
    """Switch threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize("per_thread", [60, pytest.param(1_000, marks=pytest.mark.long)])
@pytest.mark.parametrize(("names", "digests"), [(("shm", "tcp"), True), (("tcp",), False), (("shm",), False)])
def test_every_ticket_ends_once_and_commits_what_was_put(
    names: tuple[str, ...], digests: bool, per_thread: int
) -> None:
    with make_rig(
        names[0], sender_transports=names, receiver_transports=names, num_blocks=NUM_BLOCKS, digests=digests
    ) as rig:
        traffic = Traffic(rig, per_thread)
        traffic.run(seed=per_thread)

        assert traffic.wrong == []
        assert max(Counter(rig.events.reports).values()) == 1
        assert [error for error in rig.events.failures.values() if isinstance(error, InternalError)] == []
        until(lambda: all(link.load == 0 for peer in rig.sender._peers.values() for link in peer.links()))
