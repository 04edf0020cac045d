"""Ranks on both sides, random orders, losses, repeats and restarts: every ticket ends once, complete or not at all."""

import dataclasses
import random
from collections import deque
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtransfer.digest import RegionRuns, StopFlag, digest_of
from kvtransfer.framing import FrameRange
from kvtransfer.inflow import SendingRank
from kvtransfer.link_messages import Abort, Ack, Frame, Held, Nack, Open, Read, Renew, TicketMessage
from kvtransfer.quorum import Quorum
from kvtransfer.ranks import part_between, receivers_of
from kvtransfer.sender_ticket import SenderTicket
from kvtransfer.terms import Terms
from kvtransfer.ticket import ReceiverTicket
from kvtransfer.ticket_table import TicketTable
from processes.failpoints import Failpoints
from tests.examples import examples
from wire.errors import HandoffFailed, NoCapacity, PdserveError
from wire.kv_layout import KvTensor, PoolLayout, Rank

MODEL = (KvTensor(0, "k", 3, 2, "float16"), KvTensor(1, "latent", 1, 3, "float16"))
TOKENS, BLOCK_SIZE, NUM_BLOCKS, LEASE_S = 5, 2, 6, 10.0
PROMPT = b"the prompt"
MISHAPS = ("a link is lost", "P restarts", "D restarts", "D aborts", "P aborts", "leases run out")
Path = tuple[int, int]
"""A rank of P and the rank of D that it is linked to."""


class Memory:
    """A pool in ordinary memory."""

    fd = None

    def __init__(self, rank: Rank) -> None:
        self.layout = PoolLayout(MODEL, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, rank=rank)
        self.buffer = memoryview(bytearray(self.layout.total_bytes))


class Wire:
    """The inlet of every link: payloads by (ticket, tensor, token, head), as P's ranks would have them.

    Like `shm`: what lies in blocks that P has `freed` is another prompt's, and only `digests` could detect it.
    """

    def __init__(self, byte_of: Callable[[Frame, int, int], bytes]) -> None:
        self._byte_of = byte_of
        self.digests, self.freed = True, set[str]()
        self.interruption: Callable[[], None] | None = None

    def payload(self, frame: Frame) -> bytes:
        return b"".join(
            self._byte_of(frame, token, head)
            for token in range(frame.start, frame.end)
            for head in range(frame.head_start, frame.head_end)
        )

    def move(self, frame: Frame, target: RegionRuns, stop: StopFlag) -> int | None:
        data, at = self.payload(frame), 0
        if frame.ticket_id in self.freed:
            data = bytes(255 - byte for byte in data)
        if self.interruption is not None:  # what another link's thread does meanwhile
            interrupt, self.interruption = self.interruption, None
            interrupt()
            if stop.is_set():
                return None
        for offset, size in target.runs.rows():
            target.region.view[target.base + offset : target.base + offset + size] = data[at : at + size]
            at += size
        assert at == len(data)
        return self.digest(data)

    def digest(self, data: bytes) -> int:
        return digest_of([data]) if self.digests else 0

    def skip(self, frame: Frame) -> None:
        pass

    def close(self) -> None:
        pass


class Ranks(RuleBasedStateMachine):
    """Real tables, a real quorum and real sender's halves; links are queues that may be lost."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.random = 0.0, random.Random(1)
        self.wire = Wire(lambda frame, token, head: self.truth(frame.ticket_id, frame.tensor, token, head))
        self.endings: dict[str, list[str]] = {}
        self.acked: set[str] = set()
        self.failed: set[str] = set()
        self.ticket: str | None = None
        self.blocks: tuple[int, ...] = ()
        self.halves: dict[Path, SenderTicket] = {}
        self.still: list[bytes] | None = None
        self.refusal: PdserveError | None = None
        self.defects: list[str] = []
        self.num_tickets = self.num_links = 0
        self.p_epoch, self.d_epoch = 50, 70

    @initialize(p_ranks=st.integers(1, 4), d_ranks=st.integers(1, 4), digests=st.booleans())
    def set_up(self, p_ranks: int, d_ranks: int, digests: bool = True) -> None:
        self.p_ranks, self.d_ranks, self.wire.digests = p_ranks, d_ranks, digests
        self.pools = [Memory(Rank(d, d_ranks)) for d in range(d_ranks)]
        self.paths = [(p, d) for p in range(p_ranks) for d in receivers_of(MODEL, Rank(p, p_ranks), d_ranks)]
        self.links: dict[Path, int] = {}
        self.to_d: dict[Path, deque[TicketMessage]] = {}
        self.to_p: dict[Path, deque[TicketMessage]] = {}
        self.seen: list[tuple[Path, TicketMessage]] = []
        self.start_d()

    def start_d(self) -> None:
        self.quorum = Quorum(self, Failpoints.parse(""))
        self.tables = [
            TicketTable(
                epoch=self.d_epoch, memory=pool, quorum=self.quorum, clock=lambda: self.now, lease_s=LEASE_S,
                failpoints=Failpoints.parse(""), answer=partial(self.answer, d),
            )
            for d, pool in enumerate(self.pools)
        ]  # fmt: skip
        for table in self.tables:
            self.quorum.join(table)
        for path in self.paths:
            self.connect(path)

    def connect(self, path: Path) -> None:
        self.num_links += 1
        self.links[path], self.to_d[path], self.to_p[path] = self.num_links, deque(), deque()
        source = SendingRank("p", self.p_epoch, Rank(path[0], self.p_ranks))
        self.tables[path[1]].add_link(self.num_links, source, receipts=not self.wire.digests)

    def answer(self, d: int, link: int, message: TicketMessage) -> None:
        path = next((path for path, number in self.links.items() if number == link), None)
        if path is not None:
            self.to_p[path].append(message)

    def truth(self, ticket_id: str, tensor: int, token: int, head: int) -> bytes:
        size = MODEL[tensor].head_bytes
        return random.Random(f"{ticket_id} {tensor} {token} {head}").randbytes(size)

    def committed(self, ticket_id: str, description: bytes, block_ids: tuple[int, ...], kv_bytes: int) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.expect((description, block_ids) == (PROMPT, self.blocks), f"{description!r} in {block_ids}")
        self.expect(kv_bytes == TOKENS * sum(pool.layout.token_bytes for pool in self.pools), f"{kv_bytes} bytes")
        for pool in self.pools:
            for tensor, (start, end) in enumerate(pool.layout.heads):
                runs = pool.layout.runs(tensor, block_ids, 0, TOKENS)
                found = b"".join(bytes(pool.buffer[run.offset : run.offset + run.length]) for run in runs)
                wanted = [self.truth(ticket_id, tensor, t, head) for t in range(TOKENS) for head in range(start, end)]
                self.expect(found == b"".join(wanted), f"other bytes committed: {pool.layout.rank} {tensor=}")
        self.late(ticket_id)
        self.end(ticket_id, "committed")

    def ended(self, ticket_id: str, block_ids: tuple[int, ...], reason: str) -> None:
        self.expect(block_ids == self.blocks, f"{block_ids} ended")
        self.expect(not any(ticket_id in table._tickets for table in self.tables), "a rank still holds its share")
        self.end(ticket_id, "ended")

    def expect(self, fine: bool, words: str) -> None:
        """The quorum survives an error of its owner, so errors are kept for the invariant."""
        if not fine:
            self.defects.append(words)

    def late(self, ticket_id: str) -> None:
        """While the owner takes the prompt it is too late for anything else."""
        self.quorum.abort(ticket_id, "too late")
        for path, link in self.links.items():
            self.tables[path[1]].handle(link, Abort(ticket_id, self.d_epoch, "Cancelled", "too late"), self.wire)
        for table in self.tables:
            table.sweep(self.now + 1e6)

    def end(self, ticket_id: str, how: str) -> None:
        self.endings[ticket_id].append(how)
        self.still = [bytes(pool.buffer) for pool in self.pools]

    @rule(
        seed=st.integers(0, 1 << 32), mishap=st.sampled_from([None, *MISHAPS]), at=st.integers(0, 60),
        inside=st.booleans(), refused=st.sampled_from([False, False, False, True]),
        corrupt=st.sampled_from([0.0, 0.0, 0.1]),
    )  # fmt: skip
    def hand_over(self, seed: int, mishap: str | None, at: int, inside: bool, refused: bool, corrupt: float) -> None:
        """A whole hand-off, its links served in a random order, with one fault on the way, maybe inside a move."""
        order = random.Random(seed)
        if self.ticket is None or self.endings[self.ticket]:
            self.begin(refused)
        for path in order.sample(self.paths, len(self.paths)):
            self.send_all(path, lambda: order.random() < corrupt)
        for step in range(400):
            if step == at and mishap is not None:
                happen = partial(self.happen, mishap, order.choice(self.paths))
                if inside and mishap != "D restarts":
                    self.wire.interruption = happen
                else:
                    happen()
            busy = [(path, queues) for queues in (self.to_d, self.to_p) for path in self.links if queues[path]]
            if not busy:
                break
            path, queues = order.choice(busy)
            if queues is self.to_d:
                self.deliver_to(path)
            else:
                self.receive_from(path, self.to_p[path].popleft())

    @precondition(lambda self: self.ticket is None or self.endings[self.ticket])
    @rule(refused=st.sampled_from([False, False, False, True]))
    def begin_one(self, refused: bool) -> None:
        self.begin(refused)

    def begin(self, refused: bool) -> None:
        self.num_tickets += 1
        self.ticket, self.still = f"{self.num_tickets:032x}", None
        self.refusal = NoCapacity("no room") if refused else None
        self.endings[self.ticket] = []
        self.blocks = tuple(self.random.sample(range(NUM_BLOCKS), 3))
        self.quorum.reserve(self.ticket, TOKENS, 0, self.blocks)
        for path in self.paths:
            if path not in self.links:
                self.connect(path)
            part = part_between(MODEL, Rank(path[0], self.p_ranks), Rank(path[1], self.d_ranks))
            terms = Terms(part, 0, TOKENS)
            self.halves[path] = SenderTicket(self.ticket, self.d_epoch, terms, lease_s=LEASE_S, now=self.now)
            self.to_d[path].append(Open(self.ticket, self.d_epoch, TOKENS, 0))

    @rule(data=st.data(), tensor=st.integers(0, 1), start=st.integers(0, TOKENS - 1), corrupt=st.integers(0, 9))
    def put(self, data: st.DataObject, tensor: int, start: int, corrupt: int) -> None:
        path = data.draw(st.sampled_from(self.paths))
        if path in self.halves:
            self.send(path, tensor, start, TOKENS, corrupt=corrupt == 0)

    def send(self, path: Path, tensor: int, start: int, end: int, *, corrupt: bool = False) -> None:
        half = self.halves[path]
        for low, high in half.wanted(tensor, start, end):
            heads = half._terms.part.heads[tensor]
            draft = Frame(half.ticket_id, 0, 0, 0, tensor, low, high, *heads, 0, 0)
            made = half.send(FrameRange(tensor, 1, low, high), self.wire.digest(self.wire.payload(draft)), ())
            self.to_d[path].append(dataclasses.replace(made, digest=made.digest ^ 1) if corrupt else made)

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.send_all(data.draw(st.sampled_from(self.paths)), lambda: False)

    def send_all(self, path: Path, is_corrupt: Callable[[], bool]) -> None:
        """Put what is left of one part and commit it."""
        if path not in self.halves or path not in self.links or self.halves[path].over:
            return
        for tensor in range(len(MODEL)):
            for token in range(TOKENS):
                self.send(path, tensor, token, token + 1, corrupt=is_corrupt())
        speaker = min(p for p, d in self.paths if d == 0)
        reported = PROMPT if path == (speaker, 0) else b""
        commit = self.halves[path].commit(reported, digest_of([reported]))
        if commit is not None:
            self.to_d[path].append(commit)

    @rule(data=st.data(), count=st.integers(1, 9))
    def deliver(self, data: st.DataObject, count: int) -> None:
        path = data.draw(st.sampled_from(self.paths))
        for _ in range(count):
            if path in self.links and self.to_d[path]:
                self.deliver_to(path)

    def deliver_to(self, path: Path) -> None:
        message = self.to_d[path].popleft()
        self.seen.append((path, message))
        self.tables[path[1]].handle(self.links[path], message, self.wire)

    @rule(data=st.data(), elsewhere=st.booleans())
    def repeat(self, data: st.DataObject, elsewhere: bool) -> None:
        """A message that was received comes again, on its own link or on another one."""
        if not self.seen:
            return
        path, message = data.draw(st.sampled_from(self.seen[-40:]))
        path = data.draw(st.sampled_from(self.paths)) if elsewhere else path
        if path in self.links:
            self.tables[path[1]].handle(self.links[path], message, self.wire)

    @rule(data=st.data())
    def receive(self, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(self.paths))
        while path in self.links and self.to_p[path]:
            self.receive_from(path, self.to_p[path].popleft())

    def receive_from(self, path: Path, message: TicketMessage) -> None:
        half = self.halves.get(path)
        mine = half is not None and message.ticket_id == half.ticket_id
        if isinstance(message, Read):
            self.confirm(path, message, half if mine else None)
            return
        if half is None or not mine or half.over:
            return
        match message:
            case Ack():
                assert half.ack(), "acked before everything was sent"
                assert self.endings[half.ticket_id] == ["committed"]
                if all(one.state == "acked" for one in self.halves.values()):
                    self.acked.add(half.ticket_id)
            case Nack():
                try:
                    self.to_d[path].append(half.resend(message.number))
                except HandoffFailed:
                    self.fail()
            case Abort():
                half.abort()
                self.fail()
            case Renew():
                half.receiver_renewed(self.now)

    def confirm(self, path: Path, read: Read, half: SenderTicket | None) -> None:
        """Answer a READ as OutgoingTickets does: with HELD, or with ABORT and the end of the ticket."""
        if half is not None and half.holds(self.now):
            self.to_d[path].append(Held(read.ticket_id, read.epoch))
            return
        self.to_d[path].append(Abort(read.ticket_id, read.epoch, "HandoffFailed", "it holds no blocks"))
        if half is not None and not half.over:
            self.fail()

    def fail(self) -> None:
        """One part failed: the other links are aborted, as RanksSender does, and the blocks are free."""
        for path, half in self.halves.items():
            if not half.over:
                half.abort()
                if path in self.links:
                    self.to_d[path].append(Abort(half.ticket_id, half.epoch, "HandoffFailed", "a rank failed"))
        if self.ticket is not None and self.ticket not in self.acked:
            self.failed.add(self.ticket)
            self.wire.freed.add(self.ticket)

    @rule(data=st.data(), kind=st.sampled_from(MISHAPS))
    def mishap(self, data: st.DataObject, kind: str) -> None:
        self.happen(kind, data.draw(st.sampled_from(self.paths)))

    def happen(self, kind: str, path: Path) -> None:
        match kind:
            case "a link is lost":
                if path in self.links:
                    self.tables[path[1]].lost(self.links.pop(path), "the link broke")
                    self.fail()
            case "P restarts":
                for own, link in list(self.links.items()):
                    del self.links[own]
                    self.tables[own[1]].lost(link, "the peer died")
                self.fail()
                self.halves.clear()
                self.p_epoch += 1
            case "D restarts":
                if self.ticket is not None and not self.endings[self.ticket]:
                    self.endings[self.ticket].append("died")
                    self.still = None
                self.d_epoch += 1
                self.fail()
                self.start_d()
            case "D aborts":
                if self.ticket is not None:
                    self.quorum.abort(self.ticket, "cancelled")
            case "P aborts":
                self.fail()
            case "leases run out":
                self.now += LEASE_S + 1
                for table in self.tables:
                    table.sweep(self.now)

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]), renewed=st.booleans())
    def time_passes(self, seconds: float, renewed: bool) -> None:
        for path, half in self.halves.items():
            if renewed and path in self.links and half.renew(self.now):
                self.to_d[path].append(Renew(half.ticket_id, half.epoch))
        self.now += seconds
        for table in self.tables:
            table.sweep(self.now)

    @invariant()
    def each_ticket_ends_once_and_then_nothing_is_written(self) -> None:
        assert not self.defects
        assert all(len(how) <= 1 for how in self.endings.values()), self.endings
        assert all(self.endings[ticket_id] == ["committed"] for ticket_id in self.acked)
        assert not self.acked & self.failed
        if self.still is not None:
            assert [bytes(pool.buffer) for pool in self.pools] == self.still

    def teardown(self) -> None:
        """Whatever happened: when all is delivered and the leases are over, nothing is left of any ticket."""
        if not hasattr(self, "pools"):
            return
        for path in self.paths:
            while path in self.links and self.to_d[path]:
                self.deliver_to(path)
        for table in self.tables:
            table.sweep(self.now + 100)

        assert not self.defects
        assert all(len(how) == 1 for how in self.endings.values()), self.endings
        assert not self.quorum._entries
        assert not any(table._tickets for table in self.tables)


TestRanks = Ranks.TestCase
TestRanks.settings = examples(150, steps=25)


@pytest.mark.parametrize("mishap", ["a link is lost", "the sender aborts", "D aborts"])
def test_a_ready_share_ends_with_the_others_reason(mishap: str) -> None:
    machine = Ranks()
    machine.set_up(1, 2)
    machine.begin(refused=False)
    assert machine.ticket is not None
    machine.send_all((0, 0), lambda: False)
    while machine.to_d[0, 0]:
        machine.deliver_to((0, 0))
    assert machine.tables[0]._tickets[machine.ticket].committing

    if mishap == "the sender aborts":
        machine.tables[0].handle(1, Abort(machine.ticket, 70, "Cancelled", "changed my mind"), machine.wire)
    else:
        machine.happen(mishap, (0, 0))

    assert machine.endings[machine.ticket] == ["ended"]
    machine.teardown()


class _Leaving(dict[str, ReceiverTicket]):
    """Calls `gone` as soon as a ticket is taken out, as if another link's thread ran then."""

    gone: Callable[[], None]

    def __delitem__(self, ticket_id: str) -> None:
        super().__delitem__(ticket_id)
        self.gone()


@pytest.mark.parametrize("ending", ["committed", "ended"])
def test_a_message_for_a_closing_ticket_gets_its_outcome(ending: str) -> None:
    machine = Ranks()
    machine.set_up(1, 1)
    machine.begin(refused=False)
    assert machine.ticket is not None
    if ending == "committed":
        machine.send_all((0, 0), lambda: False)
    late, table = machine.to_d[0, 0][-1], machine.tables[0]
    table._tickets = leaving = _Leaving(table._tickets)
    leaving.gone = lambda: table.handle(1, late, machine.wire)

    while machine.to_d[0, 0]:
        machine.deliver_to((0, 0))
    machine.quorum.abort(machine.ticket, "the client went away")

    assert machine.endings[machine.ticket] == [ending]
    answers = [answer for answer in machine.to_p[0, 0] if not isinstance(answer, Renew)]
    assert [type(answer) for answer in answers] == [Ack if ending == "committed" else Abort] * 2
    assert all(isinstance(answer, Ack) or "the client went away" in str(answer) for answer in answers)
    machine.teardown()


class LongRanks(Ranks):
    """The same with more steps."""


TestLongRanks = pytest.mark.long(LongRanks.TestCase)
TestLongRanks.settings = examples(1_000, steps=50)
