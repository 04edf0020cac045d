"""Both state machines, compared with a model that knows only sets of tokens and the state diagram."""

import dataclasses

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from kvtransfer.framing import FrameRange
from kvtransfer.inflow import FrameVerdict, MoveResult, SendingRank
from kvtransfer.link_messages import Commit, Frame
from kvtransfer.ranks import Senders
from kvtransfer.sender_ticket import SenderState, SenderTicket
from kvtransfer.terms import RankHeads, Terms, seal_of
from kvtransfer.ticket import ReceiverState, ReceiverTicket
from tests.examples import examples
from wire.errors import HandoffFailed
from wire.kv_layout import ONLY_RANK, Heads, KvTensor, Rank

TENSORS = (KvTensor(0, "k", 3, 2, "float16"), KvTensor(0, "v", 3, 4, "float16"), KvTensor(1, "k", 1, 2, "float16"))
HEADS = tuple(Heads(0, tensor.heads) for tensor in TENSORS)
ID, EPOCH, LINK = "ab" * 16, 7, 3
FIRST, TOTAL = 2, 10
LEASE_S = 10.0
BAD_ENDINGS = (ReceiverState.ABORTED, ReceiverState.EXPIRED)
SENDER = SendingRank("prefill-0", 5, ONLY_RANK)


def receiver(now: float = 0.0) -> ReceiverTicket:
    return ReceiverTicket(
        ID, EPOCH, Senders(TENSORS, ONLY_RANK), num_tokens=TOTAL, first_token=FIRST, block_ids=(1, 2),
        lease_s=LEASE_S, now=now,
    )  # fmt: skip


def open_ticket() -> ReceiverTicket:
    ticket = receiver()
    ticket.open(LINK, SENDER, TOTAL, FIRST, 0.0)
    return ticket


def sender(now: float = 0.0) -> SenderTicket:
    return SenderTicket(ID, EPOCH, Terms(RankHeads(TENSORS, HEADS), FIRST, TOTAL), lease_s=LEASE_S, now=now)


def frame(
    number: int, tensor: int = 0, start: int = FIRST, end: int = TOTAL, digest: int = 1, heads: Heads | None = None,
    num_tensors: int = 1,
) -> Frame:  # fmt: skip
    specs, (first, last) = TENSORS[tensor : tensor + num_tensors], heads or HEADS[tensor]
    num_bytes = (end - start) * (last - first) * sum(spec.head_dim for spec in specs) * 2
    return Frame(
        ID, EPOCH, number, specs[0].layer, tensor, start, end, first, last, num_bytes, digest, num_tensors=num_tensors
    )


def cells_of(made: Frame) -> set[tuple[int, int]]:
    tensors = range(made.tensor, made.tensor + made.num_tensors)
    return {(tensor, token) for tensor in tensors for token in range(made.start, made.end)}


class ReceiverMachine(RuleBasedStateMachine):
    """Random opens, announcements, moves, commits, finishes and clock jumps, from one to four ranks of P."""

    frames = Bundle("frames")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.ticket = receiver()
        self.lease_end = LEASE_S
        self.lease_ends: dict[int, float] = {}
        self.num_frames: dict[int, int] = {}
        self.claimed: dict[tuple[int, int], set[tuple[int, int]]] = {}
        self.verified: dict[int, set[tuple[int, int]]] = {}
        self.misses: dict[tuple[int, int], int] = {}
        self.made: dict[tuple[int, int], Frame] = {}
        self.moving: list[tuple[int, Frame]] = []
        self.proposed: set[int] = set()
        self.requested: set[int] = set()
        self.held: set[int] = set()
        self.releases = 0
        self.state = ReceiverState.RESERVED

    @initialize(num_senders=st.integers(1, 4), receipts=st.one_of(st.just(set()), st.sets(st.integers(0, 3))))
    def choose_ranks(self, num_senders: int, receipts: set[int]) -> None:
        self.num_senders, self.receipts = num_senders, receipts
        self.owed = dict(Senders(TENSORS, ONLY_RANK).of(num_senders))
        self.num_frames = dict.fromkeys(self.owed, 0)
        self.verified = {p: set() for p in self.owed}

    def source(self, p: int, epoch: int = 5) -> SendingRank:
        return SendingRank("prefill-0", epoch, Rank(p, self.num_senders))

    def wanted(self, p: int) -> set[tuple[int, int]]:
        tensors = [tensor for tensor, num_bytes in enumerate(self.owed[p].token_bytes) if num_bytes]
        return {(tensor, token) for tensor in tensors for token in range(FIRST, TOTAL)}

    def taken(self, p: int) -> set[tuple[int, int]]:
        return set().union(*(cells for (rank, _), cells in self.claimed.items() if rank == p))

    def is_complete(self, p: int) -> bool:
        return p in self.proposed and self.verified[p] == self.wanted(p)

    def waits_for(self, p: int) -> bool:
        return not self.is_complete(p) or p in self.requested - self.held

    @property
    def all_in(self) -> bool:
        return self.speaks and set(self.lease_ends) == set(self.owed) and all(map(self.is_complete, self.owed))

    @property
    def speaks(self) -> bool:
        return self.state is ReceiverState.RECEIVING

    @rule(target=frames, data=st.data(), start=st.integers(FIRST, TOTAL - 1), length=st.integers(1, 8))
    def make_frame(self, data: st.DataObject, start: int, length: int) -> tuple[int, Frame]:
        p = data.draw(st.sampled_from(sorted(self.owed)))
        tensors, heads = {tensor for tensor, _ in self.wanted(p)}, self.owed[p].heads
        tensor = data.draw(st.sampled_from(sorted(tensors)))
        two = tensor + 1 in tensors and heads[tensor] == heads[tensor + 1] and data.draw(st.booleans())
        return p, self.make(p, tensor, start, min(TOTAL, start + length), num_tensors=1 + two)

    @rule(data=st.data())
    def open(self, data: st.DataObject) -> None:
        self.open_from(data.draw(st.sampled_from(sorted(self.owed))))

    def open_from(self, p: int) -> None:
        if self.state in (ReceiverState.RESERVED, ReceiverState.RECEIVING):
            self.ticket.open(10 + p, self.source(p), TOTAL, FIRST, self.now, receipt=p in self.receipts)
            self.state, self.lease_end = ReceiverState.RECEIVING, self.now + LEASE_S
            self.lease_ends[p] = max(self.lease_ends.get(p, 0.0), self.now + LEASE_S)
        else:
            with pytest.raises(HandoffFailed):
                self.ticket.open(10 + p, self.source(p), TOTAL, FIRST, self.now)

    @rule(data=st.data(), how=st.sampled_from(["reborn", "second link", "other ranks", "not of these ranks"]))
    def an_unknown_sender_opens(self, data: st.DataObject, how: str) -> None:
        if not self.lease_ends:
            return
        p = data.draw(st.sampled_from(sorted(self.lease_ends)))
        free = sorted(set(self.owed) - set(self.lease_ends)) or [p]
        sender = {
            "reborn": self.source(free[0], epoch=6),
            "second link": self.source(p),
            "other ranks": SendingRank("prefill-0", 5, Rank(0, self.num_senders + 1)),
            "not of these ranks": SendingRank("prefill-0", 5, Rank(self.num_senders, self.num_senders)),
        }[how]
        with pytest.raises(HandoffFailed, match="cannot be opened here"):
            self.ticket.open(99, sender, TOTAL, FIRST, self.now)
        assert 99 not in self.ticket.links

    @rule(one=frames, stray=st.sampled_from(["", "", "", "other link", "old epoch"]))
    def announce(self, one: tuple[int, Frame], stray: str) -> None:
        p, made = one
        if stray == "old epoch":
            assert self.ticket.accept(dataclasses.replace(made, epoch=EPOCH - 1), 10 + p) is FrameVerdict.DROP
            return
        cells = cells_of(made)
        if stray or not self.speaks or p not in self.lease_ends:
            assert self.ticket.accept(made, 50 if stray else 10 + p) is FrameVerdict.DROP
        elif (p, made.number) in self.claimed:
            repeat = self.misses[p, made.number] == 1 and one not in self.moving and not cells <= self.verified[p]
            assert self.ticket.accept(made, 10 + p) is (FrameVerdict.MOVE if repeat else FrameVerdict.DUPLICATE)
            if repeat:
                self.moving.append(one)
        elif p in self.proposed or cells & self.taken(p):
            with pytest.raises(HandoffFailed):
                self.ticket.accept(made, 10 + p)
        else:
            assert self.ticket.accept(made, 10 + p) is FrameVerdict.MOVE
            self.claimed[p, made.number] = cells
            self.moving.append(one)

    @rule(one=frames)
    def announce_the_heads_of_another_rank(self, one: tuple[int, Frame]) -> None:
        p, made = one
        others = [q for q in self.lease_ends if self.owed[q].heads[made.tensor] != self.owed[p].heads[made.tensor]]
        fresh = dataclasses.replace(made, number=1_000)
        if self.speaks and others:
            with pytest.raises(HandoffFailed, match=r"heads .* sent, .* expected"):
                self.ticket.accept(fresh, 10 + others[0])

    @rule(good=st.booleans(), cut=st.booleans(), last=st.booleans())
    def finish_a_move(self, good: bool, cut: bool, last: bool) -> None:
        if not self.moving:
            return
        p, made = self.moving.pop(-1 if last else 0)
        digest = None if cut and self.state in BAD_ENDINGS else made.digest if good else made.digest + 1
        if self.state is not ReceiverState.RECEIVING:
            assert self.ticket.finish(10 + p, made.number, digest, self.now) is MoveResult.OVER
        elif good:
            self.verify(p, made)
        elif self.misses[p, made.number] == 0:
            assert self.ticket.finish(10 + p, made.number, digest, self.now) is MoveResult.REPEAT
            self.misses[p, made.number] = 1
        else:
            with pytest.raises(HandoffFailed, match="twice"):
                self.ticket.finish(10 + p, made.number, digest, self.now)
            assert self.ticket.abort("corrupt")
            self.state = ReceiverState.ABORTED

    @rule(data=st.data(), ranks=st.sampled_from([1, 2, 4, 4]), accepted=st.booleans(), interrupted=st.booleans())
    def deliver(self, data: st.DataObject, ranks: int, accepted: bool, interrupted: bool) -> None:
        """Some ranks send and commit all that they have left, in any order: otherwise few runs would reach a commit."""
        for p in data.draw(st.permutations(sorted(self.owed)))[:ranks]:
            if self.state in (ReceiverState.RESERVED, ReceiverState.RECEIVING):
                self.open_from(p)
                self.deliver_from(p, data)
                self.propose_from(p)
        self.ask()
        for p in data.draw(st.permutations(sorted(self.requested)))[:ranks]:
            self.hold_from(p)
        self.settle_if_ready(accepted, interrupted)

    def deliver_from(self, p: int, data: st.DataObject) -> None:
        for one in [one for one in self.moving if one[0] == p]:
            self.moving.remove(one)
            self.verify(p, one[1])
        for (rank, number), cells in self.claimed.items():
            if rank == p and not cells <= self.verified[p]:
                made = self.made[p, number]
                assert self.ticket.accept(made, 10 + p) is FrameVerdict.MOVE
                self.verify(p, made)
        if p not in self.proposed:
            for tensor, token in data.draw(st.permutations(sorted(self.wanted(p) - self.taken(p)))):
                made = self.make(p, tensor, token, token + 1)
                self.claimed[p, made.number] = {(tensor, token)}
                assert self.ticket.accept(made, 10 + p) is FrameVerdict.MOVE
                self.verify(p, made)

    def verify(self, p: int, made: Frame) -> None:
        assert self.ticket.finish(10 + p, made.number, made.digest, self.now) is MoveResult.VERIFIED
        self.verified[p] |= self.claimed[p, made.number]
        self.lease_ends[p] = max(self.lease_ends[p], self.now + LEASE_S)

    def make(self, p: int, tensor: int, start: int, end: int, num_tensors: int = 1) -> Frame:
        number = self.num_frames[p]
        self.num_frames[p] += 1
        self.misses[p, number] = 0
        heads = self.owed[p].heads[tensor]
        self.made[p, number] = frame(number, tensor, start, end, number + 1, heads, num_tensors)
        return self.made[p, number]

    @rule(data=st.data())
    def propose(self, data: st.DataObject) -> None:
        self.propose_from(data.draw(st.sampled_from(sorted(self.owed))))

    def propose_from(self, p: int) -> None:
        numbers = [number for rank, number in self.claimed if rank == p]
        cells = [cell for (rank, _), those in self.claimed.items() if rank == p for cell in those]
        kv_bytes = sum(self.owed[p].token_bytes[tensor] for tensor, _ in cells)
        digests = sum(seal_of(self.made[p, number]) for number in numbers) % 2**64
        commit = Commit(ID, EPOCH, len(numbers), kv_bytes, digests, 0, b"of %d" % p)
        if not self.speaks or p not in self.lease_ends:
            assert self.ticket.propose(commit, 10 + p) is FrameVerdict.DROP
        elif p in self.proposed:
            assert self.ticket.propose(commit, 10 + p) is FrameVerdict.DUPLICATE
        elif len(cells) != len(self.wanted(p)):
            with pytest.raises(HandoffFailed, match="tensor tokens"):
                self.ticket.propose(commit, 10 + p)
        else:
            assert self.ticket.propose(commit, 10 + p) is FrameVerdict.MOVE
            self.proposed.add(p)

    @rule()
    def ask(self) -> None:
        due = self.receipts & set(self.owed) - self.requested if self.all_in else set()
        assert sorted(self.ticket.request_receipts(self.now)) == sorted(10 + p for p in due)
        self.requested |= due
        for p in due:
            self.lease_ends[p] = max(self.lease_ends[p], self.now + LEASE_S)

    @rule(p=st.integers(0, 3), stray=st.sampled_from(["", "", "other link", "old epoch"]))
    def hold(self, p: int, stray: str) -> None:
        if stray:
            assert not self.ticket.held(50 if stray == "other link" else 10 + p, EPOCH - (stray == "old epoch"))
        else:
            self.hold_from(p)

    def hold_from(self, p: int) -> None:
        taken = self.speaks and p in self.requested - self.held
        assert self.ticket.held(10 + p, EPOCH) is taken
        if taken:
            self.held.add(p)

    @rule(accepted=st.booleans(), interrupted=st.booleans())
    def commit(self, accepted: bool, interrupted: bool) -> None:
        self.settle_if_ready(accepted, interrupted)

    def settle_if_ready(self, accepted: bool, interrupted: bool) -> None:
        ready = self.all_in and self.receipts & set(self.owed) <= self.held
        assert self.ticket.ready() is ready
        if not ready:
            return
        self.ticket.begin_commit()
        if interrupted:
            assert not self.ticket.abort("too late")
            assert not self.ticket.expire(self.now + 1e9)
            assert self.ticket.committing
            assert self.ticket.request_receipts(self.now) == ()
        assert self.ticket.description == b"of %d" % min(self.owed)
        self.ticket.settle(None if accepted else "no room")
        self.state = ReceiverState.COMMITTED if accepted else ReceiverState.ABORTED

    @rule()
    def abort(self) -> None:
        living = self.state in (ReceiverState.RESERVED, ReceiverState.RECEIVING)
        assert self.ticket.abort("cancelled") is living
        if living:
            self.state = ReceiverState.ABORTED

    @rule(seconds=st.sampled_from([1.0, 4.0, 11.0]), renewed=st.sets(st.integers(0, 3)))
    def time_passes(self, seconds: float, renewed: set[int]) -> None:
        self.ticket.ready()  # as the table asks after every commit and move
        for p in renewed & set(self.lease_ends):
            self.ticket.renew(10 + p, self.now)
            self.lease_ends[p] = max(self.lease_ends[p], self.now + LEASE_S)
        self.now += seconds
        ends = [end for p, end in self.lease_ends.items() if self.waits_for(p)]
        if set(self.lease_ends) != set(self.owed):
            ends.append(self.lease_end)
        living = self.state in (ReceiverState.RESERVED, ReceiverState.RECEIVING)
        runs_out = living and any(self.now >= end for end in ends)
        assert self.ticket.expire(self.now) is runs_out
        if runs_out:
            self.state = ReceiverState.EXPIRED

    @rule()
    def release(self) -> None:
        free = self.state in BAD_ENDINGS and not self.moving and self.releases == 0
        assert self.ticket.take_release() is free
        self.releases += free

    @invariant()
    def the_state_is_the_models(self) -> None:
        assert self.ticket.state is self.state
        assert self.releases <= 1


class SenderMachine(RuleBasedStateMachine):
    """Random puts, nacks, acks, finishes and clock jumps."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.renewed = 0.0
        self.ticket = sender()
        self.sent: set[tuple[int, int]] = set()
        self.num_frames = self.seals = 0
        self.resent: set[int] = set()
        self.state = SenderState.HELD

    @property
    def sending(self) -> bool:
        return self.state in (SenderState.HELD, SenderState.SENDING)

    @rule(tensor=st.integers(0, 2), start=st.integers(0, TOTAL - 1), length=st.integers(1, 10))
    def put(self, tensor: int, start: int, length: int) -> None:
        end = min(TOTAL, start + length)
        wanted = self.ticket.wanted(tensor, start, end)
        cells = {(tensor, token) for low, high in wanted for token in range(low, high)}
        every = {(tensor, token) for token in range(max(start, FIRST), end)}
        assert cells == ((every - self.sent) if self.sending else set())
        assert sum(high - low for low, high in wanted) == len(cells)
        for low, high in wanted:
            self.send(FrameRange(tensor, 1, low, high))

    @rule(start=st.integers(FIRST, TOTAL - 1), length=st.integers(1, 10))
    def put_neighbours(self, start: int, length: int) -> None:
        """Tensors 0 and 1 have the same heads, so what both lack may share frames."""
        end = min(TOTAL, start + length)
        wanted = self.ticket.wanted(0, start, end)
        if wanted == self.ticket.wanted(1, start, end):
            for low, high in wanted:
                self.send(FrameRange(0, 2, low, high))

    def send(self, cut: FrameRange) -> None:
        made = self.ticket.send(cut, 5, ())
        assert (made.number, made.tensor, made.num_tensors, made.start, made.end) == (self.num_frames, *cut)
        assert made.num_bytes == frame(0, cut.tensor, cut.start, cut.end, num_tensors=cut.num_tensors).num_bytes
        self.num_frames += 1
        self.seals = (self.seals + seal_of(made)) % 2**64
        self.state = SenderState.SENDING
        self.sent |= cells_of(made)

    @rule()
    def commit(self) -> None:
        whole = len(self.sent) == 3 * (TOTAL - FIRST)
        if not self.sending:
            assert self.ticket.commit(b"", 0) is None
        elif not whole:
            with pytest.raises(HandoffFailed, match="never put"):
                self.ticket.commit(b"", 0)
        else:
            made = self.ticket.commit(b"x", 1)
            assert made is not None
            assert (made.num_frames, made.digest_sum) == (self.num_frames, self.seals)
            self.state = SenderState.SENT

    @rule(number=st.integers(0, 4))
    def nack(self, number: int) -> None:
        fine = self.state in (SenderState.SENDING, SenderState.SENT) and number < self.num_frames
        if fine and number not in self.resent:
            assert self.ticket.resend(number).number == number
            self.resent.add(number)
        else:
            with pytest.raises(HandoffFailed):
                self.ticket.resend(number)

    @rule(later=st.sampled_from([0.0, 4.0, 11.0]))
    def holds(self, later: float) -> None:
        """While everything is sent and the lease has not expired, checked or not."""
        at = self.now + later
        assert self.ticket.holds(at) is (self.state is SenderState.SENT and at < self.renewed + LEASE_S)

    @rule()
    def ack(self) -> None:
        assert self.ticket.ack() is (self.state is SenderState.SENT)
        if self.state is SenderState.SENT:
            self.state = SenderState.ACKED

    @rule()
    def abort(self) -> None:
        assert self.ticket.abort() is (not self.ticket_over)
        if not self.ticket_over:
            self.state = SenderState.ABORTED

    @rule(seconds=st.sampled_from([1.0, 4.0, 11.0]), renew=st.booleans())
    def time_passes(self, seconds: float, renew: bool) -> None:
        self.now += seconds
        if renew:
            assert self.ticket.renew(self.now) is self.sending
            self.renewed = self.now if self.sending else self.renewed
        runs_out = not self.ticket_over and self.now >= self.renewed + LEASE_S
        assert self.ticket.expire(self.now) is runs_out
        if runs_out:
            self.state = SenderState.EXPIRED

    @property
    def ticket_over(self) -> bool:
        return self.state in (SenderState.ACKED, SenderState.ABORTED, SenderState.EXPIRED)

    @invariant()
    def the_state_is_the_models(self) -> None:
        assert self.ticket.state is self.state
        assert self.ticket.over is self.ticket_over
        assert self.ticket.resent_frames == len(self.resent)


TestReceiverMachine = ReceiverMachine.TestCase
TestReceiverMachine.settings = examples(150, steps=40)
TestSenderMachine = SenderMachine.TestCase
TestSenderMachine.settings = examples(100, steps=30)


def test_the_blocks_are_not_free_while_a_move_is_in_flight() -> None:
    ticket = open_ticket()
    assert ticket.accept(frame(0), LINK) is FrameVerdict.MOVE

    assert ticket.abort("cancelled")
    assert not ticket.take_release()
    assert ticket.finish(LINK, 0, None, 1.0) is MoveResult.OVER

    assert ticket.take_release()
    assert not ticket.take_release()


def test_the_same_number_for_other_tokens_is_refused() -> None:
    ticket = open_ticket()
    ticket.accept(frame(0, end=6), LINK)
    assert ticket.finish(LINK, 0, 999, 0.0) is MoveResult.REPEAT

    with pytest.raises(HandoffFailed, match="was resent with a different range"):
        ticket.accept(frame(0, end=7), LINK)


def test_a_commit_with_another_digest_sum_is_refused() -> None:
    ticket = open_ticket()
    for tensor in range(3):
        ticket.accept(frame(tensor, tensor), LINK)
        ticket.finish(LINK, tensor, 1, 0.0)

    ticket.propose(Commit(ID, EPOCH, 3, ticket.kv_bytes, 4, 0, b""), LINK)

    with pytest.raises(HandoffFailed, match=r"with digest sum .*, but .* with digest sum"):
        ticket.ready()


def test_opening_for_other_tokens_is_refused_with_both_ranges() -> None:
    with pytest.raises(HandoffFailed, match=r"\[2, 10\) are expected, but \[0, 10\) were offered"):
        receiver().open(LINK, SENDER, TOTAL, 0, 0.0)
