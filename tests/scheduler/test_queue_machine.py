"""Any history of the queue: each prompt waits until it is granted or leaves, once, and no tenant exceeds its share.

The oracle counts the grants itself; it does not know how the queue finds its order.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler.admission import Admission
from scheduler.grants import Grant
from scheduler.limits import ControlLimits
from scheduler.load.loads import PromptFacts
from scheduler.load.path_costs import Expected
from scheduler.queue.queue_entry import QueueEntry
from simulation.virtual_time import VirtualTimeLoop
from tests.examples import examples

TENANTS = ("a", "b", "c")
PRIORITIES = (-1, 0, 5)
MAX_TOKENS = 50
OUTPUT = 3
MAX_COST = MAX_TOKENS + OUTPUT


class _Granted(Grant):
    def __init__(self) -> None:
        self.num_released = 0

    def release(self) -> None:
        self.num_released += 1


class Queue(RuleBasedStateMachine):
    """Prompts enter, leave and return; room appears and is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=VirtualTimeLoop)
        self.admission = Admission(ControlLimits(), self)
        self.room = 0
        self.waiting: dict[str, QueueEntry] = {}  # in the order of arrival
        self.front: set[str] = set()
        self.granted: dict[str, QueueEntry] = {}
        self.left: set[str] = set()
        self.had: dict[int, Counter[tuple[str, str]]] = {priority: Counter() for priority in PRIORITIES}
        self.since_worse = 0

    def teardown(self) -> None:
        """With room for all nobody is left behind."""
        self.room = 10**6
        self._run(self.admission.pump)
        assert not self.waiting
        assert self.admission.num_waiting == 0
        self.runner.close()

    @rule(
        tenant=st.sampled_from(TENANTS), priority=st.sampled_from(PRIORITIES), turn=st.integers(0, 2),
        num_tokens=st.integers(1, MAX_TOKENS), count=st.integers(1, 8),
    )  # fmt: skip
    def come(self, tenant: str, priority: int, turn: int, num_tokens: int, count: int) -> None:
        """Several equal prompts enter."""
        for _ in range(count):
            self._enter(tenant, priority, turn, num_tokens)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A waiting prompt leaves."""
        prompt_id = data.draw(st.sampled_from(sorted(self.waiting)))
        waiting = self.waiting[prompt_id]
        self._forget(prompt_id)
        self.left.add(prompt_id)
        self._run(lambda: self.admission.leave(waiting))
        self._run(lambda: self.admission.leave(waiting))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancelled(self, data: st.DataObject) -> None:
        """The task of a waiting prompt is cancelled: it is skipped until it leaves."""
        prompt_id = data.draw(st.sampled_from(sorted(self.waiting)))
        waiting = self.waiting[prompt_id]
        waiting.grant.cancel()
        self._forget(prompt_id)
        self.left.add(prompt_id)
        self._run(lambda: self.admission.leave(waiting))

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), again=st.booleans())
    def end(self, data: st.DataObject, again: bool) -> None:
        """A granted prompt ends and returns its grant, or finds no room after all and comes back."""
        prompt_id = data.draw(st.sampled_from(sorted(self.granted)))
        waiting = self.granted.pop(prompt_id)
        if not again:
            self.left.add(prompt_id)
            self._run(lambda: self.admission.leave(waiting))
            grant = waiting.grant.result()
            assert isinstance(grant, _Granted)
            assert grant.num_released == 1
            return
        self._run(lambda: self._come_back(prompt_id, waiting))

    @rule(room=st.integers(1, 12))
    def get_room(self, room: int) -> None:
        """There is room for some more."""
        self.room += room
        self._run(self.admission.pump)

    @invariant()
    def each_is_in_one_place(self) -> None:
        """The counts are those of the waiting prompts."""
        places = [self.waiting.keys(), self.granted.keys(), self.left]
        assert len(set().union(*places)) == sum(map(len, places))
        assert self.admission.num_waiting == len(self.waiting)
        assert self.admission.waiting_tokens == sum(one.facts.num_tokens for one in self.waiting.values())
        assert not (self.room and self.waiting)

    def _enter(self, tenant: str, priority: int, turn: int, num_tokens: int) -> None:
        def enter() -> None:
            prompt_id = f"p{len(self.waiting) + len(self.granted) + len(self.left):06}"
            facts = PromptFacts(num_tokens, OUTPUT)
            waiting = QueueEntry(prompt_id, facts, turn, tenant=tenant, priority=priority)
            self._wait_begins(tenant, priority)
            self.waiting[prompt_id] = waiting
            self.admission.enter(waiting)

        self._run(enter)

    def _come_back(self, prompt_id: str, before: QueueEntry) -> None:
        again = QueueEntry(prompt_id, before.facts, tenant=before.tenant, priority=before.priority)
        self.waiting[prompt_id] = again
        self.front.add(prompt_id)
        self.admission.enter(again, front=True)

    def refresh(self) -> None:
        """Room here is always known."""

    def first_token_s(self, waiting: int, num_tokens: int) -> Expected:
        """Nothing was measured."""
        return Expected(0.0, 0.0)

    def has_room(self, *, prefill_only: bool) -> bool:
        """Whether the next one finds room."""
        return self.room > 0

    def try_place(self, prompt_id: str, facts: PromptFacts) -> Grant | None:
        """Grant while there is room, and check that it was this one's turn."""
        if self.room == 0:
            return None
        self.room -= 1
        waiting = self.waiting[prompt_id]
        if self.front:
            assert prompt_id in self.front
        else:
            self._check_first_come(prompt_id, waiting)
            self._check_priority(waiting)
            self._check_share(waiting)
        self._forget(prompt_id)
        self.granted[prompt_id] = waiting
        return _Granted()

    def _check_first_come(self, prompt_id: str, waiting: QueueEntry) -> None:
        """No earlier prompt of its tenant and priority still waits, except later prompts of a request."""
        for before, other in self._same_priority(waiting.priority):
            if other.tenant == waiting.tenant and other.turn == 0:
                assert waiting.turn > 0 or prompt_id == before
                break

    def _check_priority(self, waiting: QueueEntry) -> None:
        better = [one for one in PRIORITIES if one < waiting.priority and any(self._same_priority(one))]
        if better:
            assert self.since_worse >= 15
        self.since_worse = 0 if better else self.since_worse + 1

    def _check_share(self, waiting: QueueEntry) -> None:
        """Of two tenants that both wait all the time, none gets more than the other and a prompt of each."""
        had = self.had[waiting.priority]
        for other in {one.tenant for _, one in self._same_priority(waiting.priority)} - {waiting.tenant}:
            had[waiting.tenant, other] += waiting.facts.num_tokens + OUTPUT
            assert had[waiting.tenant, other] - had[other, waiting.tenant] <= 2 * MAX_COST

    def _wait_begins(self, tenant: str, priority: int) -> None:
        """Reset the counts of a tenant without waiting prompts."""
        if all(one.tenant != tenant for _, one in self._same_priority(priority)):
            for other in TENANTS:
                self.had[priority][tenant, other] = self.had[priority][other, tenant] = 0

    def _same_priority(self, priority: int) -> Iterator[tuple[str, QueueEntry]]:
        return ((i, one) for i, one in self.waiting.items() if one.priority == priority and i not in self.front)

    def _forget(self, prompt_id: str) -> None:
        del self.waiting[prompt_id]
        self.front.discard(prompt_id)

    def _run(self, step: Any) -> None:
        async def run() -> None:
            step()

        self.runner.run(run())


TestQueue = Queue.TestCase
TestQueue.settings = examples(60, steps=40)
