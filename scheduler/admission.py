"""The cluster's queue: prompts wait here, in the order of queue/fair_queue.py, until placement has room for them.

Limited in prompts and in tokens. If there is no room for the first, a few others may overtake it, but only so often:
then all wait for it, so that a large prompt does not starve.
"""

import asyncio
import itertools
import math
from typing import Protocol

from scheduler.grants import Grant
from scheduler.limits import ControlLimits
from scheduler.load.loads import PromptFacts
from scheduler.queue.fair_queue import FairQueue
from scheduler.queue.prompt_costs import PromptCosts
from scheduler.queue.room import QueueRoom
from scheduler.queue.waiting import Waiting
from wire.errors import Overloaded, PdserveError

_MOST_RETRY_S = 60
_WINDOW = 8
_MOST_PASSED = 16


class GrantSource(Protocol):
    """The interface to placement, implemented by scheduler/grants.py."""

    def look_anew(self) -> None:
        """Discard cached loads, which may have changed."""
        ...

    def has_room(self, *, stays: bool) -> bool:
        """Whether placing any prompt may succeed; `stays`: also one that finishes where it is prefilled."""
        ...

    def try_place(self, prompt_id: str, facts: PromptFacts) -> Grant | None:
        """Book and return a grant, or None to wait. Raises the PdserveError that fails the prompt."""
        ...


class Admission:
    """Owner of the queue."""

    def __init__(self, limits: ControlLimits, places: GrantSource) -> None:
        self._places = places
        self._queue: FairQueue[Waiting] = FairQueue()
        self._room = QueueRoom(limits)
        self.costs = PromptCosts()
        self._num_staying = 0
        self._without_room: set[Waiting] = set()  # tried since the last change
        self._pump: asyncio.Handle | None = None
        self._granted_at: float | None = None
        self._seconds_per_grant = 0.0

    @property
    def num_waiting(self) -> int:
        """Prompts in the queue."""
        return self._room.num_prompts

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens in the queue."""
        return self._room.num_tokens

    def check_room(self, num_prompts: int, num_tokens: int, tenant: str = "") -> None:
        """Raise Overloaded if these prompts do not fit into the queue."""
        refusal = self._room.refusal(tenant, num_prompts, num_tokens)
        if refusal is not None:
            raise Overloaded(refusal, self._retry_after_s())

    def enter(self, waiting: Waiting, *, front: bool = False) -> None:
        """Put a prompt into the queue at its turn, or back at the front."""
        waiting.cost = self.costs.cost(waiting.tenant, waiting.facts)
        if front:
            self._queue.add_front(waiting)
        else:
            self._queue.add(waiting)
        self._room.take(waiting.tenant, waiting.facts.num_tokens)
        self._num_staying += waiting.facts.stays
        self._places.look_anew()
        self._fill()

    def leave(self, waiting: Waiting) -> None:
        """Remove a prompt, whether it is waiting or was granted. Idempotent."""
        if waiting in self._queue:
            held_up_others = waiting in self._without_room
            self._queue.remove(waiting)
            self._forget(waiting)
            waiting.grant.cancel()
            if held_up_others:
                self._places.look_anew()
                self._fill()
        elif waiting.grant.done() and not waiting.grant.cancelled() and waiting.grant.exception() is None:
            waiting.grant.result().release()

    def changed(self) -> None:
        """Schedule one pass over the queue after a load, a booking or a member changed: many change at once."""
        if self._pump is None and self._queue:
            self._pump = asyncio.get_running_loop().call_soon(self.pump)

    def pump(self) -> None:
        """Grant prompts while there is room."""
        self._pump = None
        self._places.look_anew()
        if self._queue and self._places.has_room(stays=self._num_staying > 0):
            self._without_room.clear()
            self._fill()

    def _fill(self) -> None:
        while self._queue and self._take_one():
            pass

    def _take_one(self) -> bool:
        """Try the first prompts in the queue that were not tried yet; return whether one left the queue."""
        passed: list[Waiting] = []
        for waiting in itertools.islice(self._queue.order(), _WINDOW):
            if waiting not in self._without_room and self._goes(waiting):
                self._take_out(waiting, passed)
                return True
            self._without_room.add(waiting)
            if waiting.passed >= _MOST_PASSED:
                return False
            passed.append(waiting)
        return False

    def _goes(self, waiting: Waiting) -> bool:
        """Try to place a prompt; return whether it no longer waits."""
        if not waiting.grant.done():  # done: cancelled while waiting; its request is about to remove it
            try:
                grant = self._places.try_place(waiting.prompt_id, waiting.facts)
            except PdserveError as error:
                waiting.grant.set_exception(error)
            else:
                if grant is not None:
                    waiting.grant.set_result(grant)
        return waiting.grant.done()

    def _take_out(self, waiting: Waiting, passed: list[Waiting]) -> None:
        if waiting.grant.cancelled() or waiting.grant.exception() is not None:
            self._queue.remove(waiting)
        else:
            self._queue.grant(waiting)
            for one in passed:
                one.passed += 1
            self._note_time()
        self._forget(waiting)

    def _forget(self, waiting: Waiting) -> None:
        self._without_room.discard(waiting)
        self._room.give_back(waiting.tenant, waiting.facts.num_tokens)
        self._num_staying -= waiting.facts.stays

    def _note_time(self) -> None:
        """Update the smoothed time between grants while others wait."""
        now = asyncio.get_running_loop().time()
        if self._granted_at is not None:
            self._seconds_per_grant += 0.2 * (now - self._granted_at - self._seconds_per_grant)
        self._granted_at = now if self._queue else None

    def _retry_after_s(self) -> int:
        return max(1, min(_MOST_RETRY_S, math.ceil(self._seconds_per_grant * self.num_waiting)))
