"""Both state machines against a model that knows only sets of tokens and the drawing."""

import dataclasses

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from kvtransfer.frame import Commit, Frame
from kvtransfer.ticket import Progress, ReceiverState, ReceiverTicket, SenderState, SenderTicket, Verdict
from wire.errors import HandoffFailed
from wire.kv_layout import KvTensor

TENSORS = (KvTensor(0, "k", 1, 2, "float16"), KvTensor(0, "v", 1, 4, "float16"), KvTensor(1, "k", 1, 2, "float16"))
ID, EPOCH, LINK = "ab" * 16, 7, 3
FIRST, TOTAL = 2, 10
LEASE_S = 10.0
BAD_ENDINGS = (ReceiverState.ABORTED, ReceiverState.EXPIRED)


def receiver(now: float = 0.0) -> ReceiverTicket:
    return ReceiverTicket(
        ID, EPOCH, TENSORS, num_tokens=TOTAL, first_token=FIRST, block_ids=(1, 2), lease_s=LEASE_S, now=now
    )


def sender(now: float = 0.0) -> SenderTicket:
    return SenderTicket(ID, EPOCH, TENSORS, num_tokens=TOTAL, first_token=FIRST, lease_s=LEASE_S, now=now)


def frame(number: int, tensor: int = 0, start: int = FIRST, end: int = TOTAL, digest: int = 1) -> Frame:
    spec = TENSORS[tensor]
    return Frame(
        ID, EPOCH, number, spec.layer, tensor, start, end, 0, spec.heads, (end - start) * spec.token_bytes, digest
    )


class ReceiverMachine(RuleBasedStateMachine):
    """Random announcements, moves, commits, endings and clock jumps."""

    frames = Bundle("frames")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.ticket = receiver()
        self.lease_end = LEASE_S
        self.claimed: dict[int, set[tuple[int, int]]] = {}
        self.verified: set[tuple[int, int]] = set()
        self.misses: dict[int, int] = {}
        self.moving: list[Frame] = []
        self.proposed = self.committing = False
        self.releases = 0
        self.state = ReceiverState.RESERVED

    @rule(target=frames, tensor=st.integers(0, 2), start=st.integers(FIRST, TOTAL - 1), length=st.integers(1, 8))
    def make_frame(self, tensor: int, start: int, length: int) -> Frame:
        number = len(self.misses)
        self.misses[number] = 0
        return frame(number, tensor, start, min(TOTAL, start + length), digest=number + 1)

    @rule()
    def open(self) -> None:
        if self.state in (ReceiverState.RESERVED, ReceiverState.RECEIVING):
            self.ticket.open(LINK, TOTAL, FIRST, self.now)
            self.state, self.lease_end = ReceiverState.RECEIVING, self.now + LEASE_S
        else:
            with pytest.raises(HandoffFailed):
                self.ticket.open(LINK, TOTAL, FIRST, self.now)

    @rule(one=frames, link=st.sampled_from([LINK, LINK, LINK, 4]), old=st.booleans())
    def announce(self, one: Frame, link: int, old: bool) -> None:
        if old:
            assert self.ticket.accept(dataclasses.replace(one, epoch=EPOCH - 1), link) is Verdict.DROP
            return
        cells = {(one.tensor, token) for token in range(one.start, one.end)}
        taken = set().union(*self.claimed.values()) if self.claimed else set()
        if self.state is not ReceiverState.RECEIVING or link != LINK:
            assert self.ticket.accept(one, link) is Verdict.DROP
        elif one.number in self.claimed:
            repeat = self.misses[one.number] == 1 and one not in self.moving and not cells <= self.verified
            assert self.ticket.accept(one, link) is (Verdict.MOVE if repeat else Verdict.DUPLICATE)
            if repeat:
                self.moving.append(one)
        elif self.proposed or cells & taken:
            with pytest.raises(HandoffFailed):
                self.ticket.accept(one, link)
        else:
            assert self.ticket.accept(one, link) is Verdict.MOVE
            self.claimed[one.number] = cells
            self.moving.append(one)

    @rule(good=st.booleans(), cut=st.booleans())
    def finish_a_move(self, good: bool, cut: bool) -> None:
        if not self.moving:
            return
        one = self.moving.pop(0)
        digest = None if cut and self.state in BAD_ENDINGS else one.digest if good else one.digest + 1
        if self.state is not ReceiverState.RECEIVING:
            assert self.ticket.finish(one.number, digest, self.now) is Progress.OVER
        elif good:
            assert self.ticket.finish(one.number, digest, self.now) is Progress.VERIFIED
            self.verified |= self.claimed[one.number]
            self.lease_end = max(self.lease_end, self.now + LEASE_S)
        elif self.misses[one.number] == 0:
            assert self.ticket.finish(one.number, digest, self.now) is Progress.REPEAT
            self.misses[one.number] = 1
        else:
            with pytest.raises(HandoffFailed, match="twice"):
                self.ticket.finish(one.number, digest, self.now)
            assert self.ticket.abort("corrupt")
            self.state = ReceiverState.ABORTED

    @rule()
    def propose(self) -> None:
        digest_sum = sum(number + 1 for number in self.claimed)
        claimed = sum(len(cells) for cells in self.claimed.values())
        kv_bytes = sum(TENSORS[tensor].token_bytes for cells in self.claimed.values() for tensor, _ in cells)
        commit = Commit(ID, EPOCH, len(self.claimed), kv_bytes, digest_sum, 0, b"d")
        if self.state is not ReceiverState.RECEIVING:
            assert self.ticket.propose(commit, LINK) is Verdict.DROP
        elif self.proposed:
            assert self.ticket.propose(commit, LINK) is Verdict.DUPLICATE
        elif claimed != 3 * (TOTAL - FIRST):
            with pytest.raises(HandoffFailed, match="tensor tokens"):
                self.ticket.propose(commit, LINK)
        else:
            assert self.ticket.propose(commit, LINK) is Verdict.MOVE
            self.proposed = True

    @rule(accepted=st.booleans(), interrupted=st.booleans())
    def commit(self, accepted: bool, interrupted: bool) -> None:
        ready = self.state is ReceiverState.RECEIVING and self.proposed and len(self.verified) == 3 * (TOTAL - FIRST)
        assert self.ticket.ready() is ready
        if not ready:
            return
        self.ticket.begin_commit()
        if interrupted:
            assert not self.ticket.abort("too late")
            assert not self.ticket.expire(self.now + 1e9)
        self.ticket.settle(None if accepted else "no room")
        self.state = ReceiverState.COMMITTED if accepted else ReceiverState.ABORTED

    @rule()
    def abort(self) -> None:
        living = self.state in (ReceiverState.RESERVED, ReceiverState.RECEIVING)
        assert self.ticket.abort("cancelled") is living
        if living:
            self.state = ReceiverState.ABORTED

    @rule(seconds=st.sampled_from([1.0, 4.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        runs_out = self.state in (ReceiverState.RESERVED, ReceiverState.RECEIVING) and self.now >= self.lease_end
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
    """Random puts, nacks, acks, endings and clock jumps."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.renewed = 0.0
        self.ticket = sender()
        self.sent: set[tuple[int, int]] = set()
        self.num_frames = 0
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
            made = self.ticket.send(tensor, low, high, 5, ())
            assert (made.number, made.start, made.end) == (self.num_frames, low, high)
            self.num_frames += 1
            self.state = SenderState.SENDING
        self.sent |= cells

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
            assert (made.num_frames, made.digest_sum) == (self.num_frames, 5 * self.num_frames)
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
TestReceiverMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestSenderMachine = SenderMachine.TestCase
TestSenderMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_the_blocks_are_not_free_while_a_move_is_under_way() -> None:
    ticket = receiver()
    ticket.open(LINK, TOTAL, FIRST, 0.0)
    assert ticket.accept(frame(0), LINK) is Verdict.MOVE

    assert ticket.abort("cancelled")
    assert not ticket.take_release()
    assert ticket.finish(0, None, 1.0) is Progress.OVER

    assert ticket.take_release()
    assert not ticket.take_release()


def test_the_same_number_for_other_tokens_is_refused() -> None:
    ticket = receiver()
    ticket.open(LINK, TOTAL, FIRST, 0.0)
    ticket.accept(frame(0, end=6), LINK)
    assert ticket.finish(0, 999, 0.0) is Progress.REPEAT

    with pytest.raises(HandoffFailed, match="came again as another"):
        ticket.accept(frame(0, end=7), LINK)


def test_a_commit_with_another_digest_sum_is_refused() -> None:
    ticket = receiver()
    ticket.open(LINK, TOTAL, FIRST, 0.0)
    for tensor in range(3):
        ticket.accept(frame(tensor, tensor), LINK)
        ticket.finish(tensor, 1, 0.0)

    ticket.propose(Commit(ID, EPOCH, 3, ticket.kv_bytes, 4, 0, b""), LINK)

    with pytest.raises(HandoffFailed, match="digests"):
        ticket.ready()


def test_opening_for_other_tokens_is_refused_with_both_ranges() -> None:
    with pytest.raises(HandoffFailed, match=r"\[2, 10\) are wanted, \[0, 10\) are offered"):
        receiver().open(LINK, TOTAL, 0, 0.0)
