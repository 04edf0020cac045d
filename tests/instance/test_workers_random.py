"""Both halves of a prefill and a decode instance under random orders of all events of a hand-off.

Two sessions share each instance; they end, with or without their streams, and the next ones adopt those. Whatever the
order, each accepted prompt finishes once on its instance, no event of it follows or reaches the other session, and at
the end no block, ticket or other state of it is left.
"""

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.examples import examples
from tests.instance.two_halves import CONFIG, Link, Side
from wire.errors import PdserveError
from wire.messages import Cancel
from wire.types import PromptState, ResumableStream, SamplingParams

MAX_TURNS = 200


SIDES = st.sampled_from(["p", "d"])
LENGTHS = st.integers(1, 60)


class HandOffs(RuleBasedStateMachine):
    """Starts prompts, advances them, and ends them in every way, in any order."""

    config = CONFIG

    def __init__(self) -> None:
        super().__init__()
        self.link = Link(self.config)
        self.states: dict[str, PromptState] = {}
        self.on: dict[str, set[str]] = {"p": set(), "d": set()}  # the prompts that each side accepted

    @rule(
        length=LENGTHS,
        max_tokens=st.integers(1, 12),
        n=st.integers(1, 3),
        continues=st.booleans(),
        same_prompt=st.booleans(),
    )
    def reserve(self, length: int, max_tokens: int, n: int, continues: bool, same_prompt: bool) -> None:
        state = self._state(length, max_tokens, n, same_prompt=same_prompt)
        self.on["d"].add(state.prompt_id)
        self.link.d.workers.decode.reserve(self.link.d.owner(state.prompt_id), state)
        if continues and state.prompt_id in self.link.d.tickets:
            self._prefill(state)

    @precondition(lambda self: self.link.d.tickets)
    @rule(data=st.data(), resumed=st.booleans())
    def prefill(self, data: st.DataObject, resumed: bool) -> None:
        state = self.states[data.draw(st.sampled_from(sorted(self.link.d.tickets)))]
        resumes = resumed and state.params.max_tokens > 1
        self._prefill(replace(state, outputs=((30,),) * state.params.n) if resumes else state)

    @rule(length=LENGTHS, max_tokens=st.integers(1, 12), n=st.integers(1, 3), side=SIDES)
    def generate(self, length: int, max_tokens: int, n: int, side: str) -> None:
        state = self._state(length, max_tokens, n, same_prompt=True)
        self.on[side].add(state.prompt_id)
        half = self._side(side)
        half.workers.decode.generate(half.owner(state.prompt_id), state)

    @rule(side=SIDES)
    def run_posts(self, side: str) -> None:
        self._side(side).run_posts()

    @rule(side=SIDES, count=st.integers(1, 4))
    def steps(self, side: str, count: int) -> None:
        for _ in range(count):
            self._side(side).step()

    @precondition(lambda self: self.states)
    @rule(side=SIDES, data=st.data())
    def step_with_a_cancel_before_it_is_reported(self, side: str, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.states)))
        half = self._side(side)
        half.step(lambda: half.cancel(name))

    @precondition(lambda self: self.states)
    @rule(side=SIDES, data=st.data(), sequence=st.sampled_from([None, None, 0, 1]))
    def cancel(self, side: str, data: st.DataObject, sequence: int | None) -> None:
        name = data.draw(st.sampled_from(sorted(self.states)))
        self._side(side).cancel(name, sequence)

    @precondition(lambda self: self.link.commits)
    @rule(data=st.data())
    def commit_arrives(self, data: st.DataObject) -> None:
        self.link.deliver(data.draw(st.sampled_from(list(self.link.commits))))

    @precondition(lambda self: self.link.news)
    @rule(count=st.integers(1, 5))
    def news_arrive(self, count: int) -> None:
        for _ in range(min(count, len(self.link.news))):
            self.link.news.popleft()()

    @precondition(lambda self: self.link.open_tickets or self.link.sending)
    @rule(data=st.data(), first=SIDES)
    def a_ticket_fails(self, data: st.DataObject, first: str) -> None:
        ticket_id = data.draw(st.sampled_from([*dict.fromkeys([*self.link.open_tickets, *self.link.sending])]))
        if first == "p":
            self.link.fail_on_p(ticket_id)
            self.link.news.append(lambda: self.link.end_on_d(ticket_id, "the link is lost"))
        else:
            self.link.end_on_d(ticket_id, "the lease ran out")

    @rule()
    def all_go_on(self) -> None:
        for ticket_id in list(self.link.commits):
            self.link.deliver(ticket_id)
        self.link.p.step()
        self.link.d.step()

    @rule(side=SIDES)
    def the_next_step_fails(self, side: str) -> None:
        self._side(side).model.breaks = True

    @rule(at_begin=st.booleans())
    def the_sender_breaks(self, at_begin: bool) -> None:
        self.link.breaks_at_begin |= at_begin
        self.link.breaks_at_commit |= not at_begin

    @rule(side=SIDES, number=st.integers(0, 1), keep_streams=st.booleans())
    def a_session_ends(self, side: str, number: int, keep_streams: bool) -> None:
        half = self._side(side)
        its = {name for name in self.on[side] if half.owners[number].owns(name)}
        half.end_session(number, keep_streams=keep_streams)
        half.silent |= its
        if side == "d":
            half.tickets = {name: ticket for name, ticket in half.tickets.items() if name not in its}

    @precondition(lambda self: self.states)
    @rule(side=SIDES, data=st.data())
    def a_stream_is_adopted(self, side: str, data: st.DataObject) -> None:
        state = self.states[data.draw(st.sampled_from(sorted(self.states)))]
        if state.stream is not None:
            self._side(side).adopt(state.prompt_id, state.stream.stream_id)

    @rule(side=SIDES)
    def orphans_end(self, side: str) -> None:
        self._side(side).end_orphans()

    @precondition(lambda self: self.states)
    @rule(side=SIDES, data=st.data())
    def another_session_cancels(self, side: str, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.states)))
        half = self._side(side)
        (other,) = [one for one in half.owners if not one.owns(name)]
        half.run_posts()
        before = (list(half.finished), list(half.failed))
        half.workers.cancel(other, Cancel(name))
        half.run_posts()
        assert (half.finished, half.failed) == before

    @invariant()
    def blocks_are_accounted_for_and_events_are_in_order(self) -> None:
        for side in (self.link.p, self.link.d):
            side.core.blocks.check()
            assert side.wrong == []

    def teardown(self) -> None:
        try:
            self._end_all()
            for side in ("p", "d"):
                self._side(side).check_empty()
                for name in sorted(self.on[side] - self._side(side).silent):
                    self._assert_ended_once(side, name)
        finally:
            self.link.p.model.close()
            self.link.d.model.close()

    def _end_all(self) -> None:
        """Let everything run to its end; tickets without a prefill expire."""
        for _ in range(MAX_TURNS):
            for ticket in [*self.link.d.tickets.values()]:
                self.link.end_on_d(ticket.ticket_id, "the lease ran out")
            self.link.d.tickets.clear()
            for ticket_id in list(self.link.commits):
                self.link.deliver(ticket_id)
            while self.link.news:
                self.link.news.popleft()()
            for ticket_id in [one for one in self.link.open_tickets if one not in self.link.sending]:
                self.link.end_on_d(ticket_id, "the lease ran out")
            self.link.p.step()
            self.link.d.step()
            if not self._is_busy():
                break
        else:
            self._fail_as_busy()
        for side in (self.link.p, self.link.d):
            side.end_orphans()
            for name in self.states:
                if not any(key[0] == name for key in side.finished):
                    continue
                side.cancel(name)
            side.run_posts()

    def _fail_as_busy(self) -> None:
        loads = [side.core.load() for side in (self.link.p, self.link.d)]
        raise AssertionError(
            f"work is left after {MAX_TURNS} turns: {loads}, {self.link.open_tickets}, {self.link.sending}"
        )

    def _is_busy(self) -> bool:
        link = self.link
        if link.commits or link.news or link.open_tickets or link.sending or link.d.tickets:
            return True
        return any(side.posted or side.core._batch.prompts() or side.core.has_work() for side in (link.p, link.d))

    def _assert_ended_once(self, side: str, name: str) -> None:
        half = self._side(side)
        failures, handed = half.failed.count(name), half.ended.count(name)
        if side == "p" and name not in self._generated_on_p():
            assert failures + handed == 1, (side, name, failures, handed)
            return
        finished = {key for one in (self.link.p, self.link.d) for key in one.finished if key[0] == name}
        whole = len(finished) == self.states[name].params.n and bool([key for key in half.finished if key[0] == name])
        assert failures + whole >= 1, (side, name, failures, finished)
        assert failures <= 1, (side, name, failures)

    def _generated_on_p(self) -> set[str]:
        return self.on["p"] - self.on["d"]

    def _prefill(self, state: PromptState) -> None:
        ticket = self.link.d.tickets.pop(state.prompt_id)
        try:
            self.link.p.workers.prefill.accept(self.link.p.owner(state.prompt_id), state, ticket)
        except (PdserveError, RuntimeError):
            return  # refused: no event of it may follow
        self.on["p"].add(state.prompt_id)

    def _side(self, side: str) -> Side:
        return self.link.p if side == "p" else self.link.d

    def _state(self, length: int, max_tokens: int, n: int, *, same_prompt: bool) -> PromptState:
        name = f"p{len(self.states)}"
        params = SamplingParams(max_tokens, n=n, seed=length, stop_token_ids=(0, 1, 2), temperature=1.0)
        begin = 0 if same_prompt else length
        ids = tuple((begin * 13 + i * 5) % 60 for i in range(length))
        stream = ResumableStream(f"{len(self.states):032x}", "", b"") if n == 1 else None
        self.states[name] = PromptState(name, name, ids, params, stream=stream)
        return self.states[name]


class HandOffsAhead(HandOffs):
    """The same with engines that launch a step before the last one is collected."""

    config = replace(CONFIG, runs_ahead=True)


TestHandOffs, TestHandOffsAhead = HandOffs.TestCase, HandOffsAhead.TestCase
TestHandOffs.settings = examples(40, steps=40)
TestHandOffsAhead.settings = TestHandOffs.settings
