"""The cluster's queue: prompts wait here, in the order of queue/fair_queue.py, until placement has room for them.

The queue is limited in prompts and in tokens. If there is no room for the first prompt, others may overtake it a
limited number of times; after that all wait for it, so that a large prompt does not starve.
"""

import asyncio
import itertools
import math
from dataclasses import replace
from typing import Protocol

from scheduler.finished_requests import OF_FIRST_TOKEN
from scheduler.grants import Grant
from scheduler.limits import ControlLimits
from scheduler.load.loads import PromptFacts
from scheduler.load.path_costs import Expected
from scheduler.queue.fair_queue import FairQueue
from scheduler.queue.prompt_costs import PromptCosts
from scheduler.queue.queue_entry import QueueEntry
from scheduler.queue.room import QueueRoom
from scheduler.request_class import UNCLASSED, RequestClass
from wire.errors import Overloaded, PdserveError

_MAX_RETRY_S = 60
_WINDOW = 8
_MAX_OVERTAKEN = 16
_FIRST_RETRIES, _RETRIES_PER_PROMPT, _MOST_RETRIES = 5.0, 0.15, 50.0
"""The retries left to requests that --ttft-limit refuses: how many at the start, how many an accepted prompt adds, the
maximum. If all refused requests were retried, a lasting overload would double, and none of them would be served."""


class GrantSource(Protocol):
    """The interface to placement, implemented by scheduler/grants.py."""

    def refresh(self) -> None:
        """Discard cached loads, which may have changed."""
        ...

    def first_token_s(self, waiting: int, num_tokens: int) -> Expected:
        """Return when a prompt behind `waiting` tokens is expected to have its first token; 0 if not known."""
        ...

    def has_room(self, *, prefill_only: bool) -> bool:
        """Return whether some prompt may find room; `prefill_only`: even if only one that finishes at its prefill."""
        ...

    def try_place(self, prompt_id: str, facts: PromptFacts) -> Grant | None:
        """Book and return a grant, or None to wait. Raises the PdserveError that fails the prompt."""
        ...


class Admission:
    """Owner of the queue."""

    def __init__(self, limits: ControlLimits, grants: GrantSource) -> None:
        self._grants = grants
        self._ttft_limit_s = limits.ttft_limit_s
        self._compares = limits.compare_paths
        self._queue: FairQueue[QueueEntry] = FairQueue()
        self._room = QueueRoom(limits)
        self.costs = PromptCosts()
        self._num_prefill_only = 0
        self._retries_left = _FIRST_RETRIES
        self._without_room: set[QueueEntry] = set()  # tried in vain since loads or members changed
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

    def check_room(
        self, num_prompts: int, num_tokens: int, tenant: str = "", request_class: RequestClass = UNCLASSED
    ) -> None:
        """Raise Overloaded if these prompts do not fit into the queue, or if their first token would come too late."""
        refusal = self._room.refusal(tenant, num_prompts, num_tokens)
        if refusal is not None:
            message, limit = refusal
            raise Overloaded(message, self._retry_after_s(), limit=limit)
        limit_s = request_class.ttft_limit_s or self._ttft_limit_s
        if limit_s:
            owner = f"class {request_class.name}" if request_class.ttft_limit_s else "--ttft-limit"
            self._check_first_token(num_tokens, limit_s, owner)

    def _check_first_token(self, num_tokens: int, limit_s: float, owner: str) -> None:
        """Raise Overloaded if a request of this many tokens is expected to have its first token after the limit."""
        self._grants.refresh()
        expected = self._grants.first_token_s(self.waiting_tokens, num_tokens)
        if expected.now_s <= limit_s:
            return
        retry_after_s = max(1, min(_MAX_RETRY_S, math.ceil(expected.now_s - limit_s)))
        when, is_final = f"after {expected.now_s:.1f} s", False
        if expected.idle_s > limit_s:
            when, is_final = f"after {expected.idle_s:.1f} s on an idle cluster", True
        elif self._retries_left < 1:
            when, is_final = f"{when}, and requests refused earlier will retry before there is room", True
        else:
            self._retries_left -= 1
        message = f"the first token is expected {when} (limit {limit_s:g} s, {owner})"
        raise Overloaded(message, retry_after_s, is_final=is_final, limit=OF_FIRST_TOKEN)

    def enter(self, entry: QueueEntry, *, front: bool = False) -> None:
        """Put a prompt into the queue at its turn, or back at the front."""
        entry.cost = self.costs.cost(entry.tenant, entry.facts)
        self._grants.refresh()
        if not front:
            self._retries_left = min(_MOST_RETRIES, self._retries_left + _RETRIES_PER_PROMPT)
        if not self._queue:
            if self._try_grant(entry):
                return
            self._without_room.add(entry)
        if front:
            self._queue.add_front(entry)
        else:
            self._queue.add(entry)
        self._room.take(entry.tenant, entry.facts.num_tokens)
        self._num_prefill_only += entry.facts.prefill_only
        self._fill()

    def leave(self, entry: QueueEntry) -> None:
        """Remove a prompt, whether it is waiting or was granted. Idempotent."""
        if entry in self._queue:
            held_up_others = entry in self._without_room
            self._queue.remove(entry)
            self._subtract(entry)
            entry.grant.cancel()
            if held_up_others:
                self._grants.refresh()
                self._fill()
        elif entry.grant.done() and not entry.grant.cancelled() and entry.grant.exception() is None:
            entry.grant.result().release()

    def changed(self) -> None:
        """Schedule one pass over the queue after a load, a booking or a member changed: many change at once."""
        if self._pump is None and self._queue:
            self._pump = asyncio.get_running_loop().call_soon(self.pump)

    def pump(self) -> None:
        """Grant prompts while there is room."""
        self._pump = None
        self._grants.refresh()
        if self._queue and self._grants.has_room(prefill_only=self._num_prefill_only > 0):
            self._without_room.clear()
            self._fill()

    def _fill(self) -> None:
        while self._queue and self._grant_one():
            pass

    def _grant_one(self) -> bool:
        """Try the first prompts in the queue that were not tried yet; return whether one left the queue."""
        overtaken: list[QueueEntry] = []
        for entry in itertools.islice(self._queue.order(), _WINDOW):
            if entry not in self._without_room and self._try_grant(entry):
                self._leave_queue(entry, overtaken)
                return True
            self._without_room.add(entry)
            if entry.num_overtaken >= _MAX_OVERTAKEN:
                return False
            overtaken.append(entry)
        return False

    def _try_grant(self, entry: QueueEntry) -> bool:
        """Try to place a prompt; return whether it no longer waits."""
        if not entry.grant.done():  # done: cancelled while waiting; its request is about to remove it
            try:
                grant = self._grants.try_place(entry.prompt_id, self._facts_of(entry))
            except PdserveError as error:
                entry.grant.set_exception(error)
            else:
                if grant is not None:
                    entry.grant.set_result(grant)
        return entry.grant.done()

    def _facts_of(self, entry: QueueEntry) -> PromptFacts:
        """Return the prompt's facts; if paths are compared, with the facts that only the comparison needs."""
        if not self._compares:
            return entry.facts
        is_queued = entry in self._queue
        return replace(
            entry.facts,
            expected_outputs=self.costs.expected_outputs(entry.tenant, entry.facts),
            num_behind=self.num_waiting - is_queued,
            tokens_behind=self.waiting_tokens - (entry.facts.num_tokens if is_queued else 0),
        )

    def _leave_queue(self, entry: QueueEntry, overtaken: list[QueueEntry]) -> None:
        if entry.grant.cancelled() or entry.grant.exception() is not None:
            self._queue.remove(entry)
        else:
            self._queue.grant(entry)
            for one in overtaken:
                one.num_overtaken += 1
            self._note_time()
        self._subtract(entry)

    def _subtract(self, entry: QueueEntry) -> None:
        self._without_room.discard(entry)
        self._room.give_back(entry.tenant, entry.facts.num_tokens)
        self._num_prefill_only -= entry.facts.prefill_only
        if not self._queue:
            self._granted_at = None

    def _note_time(self) -> None:
        """Update the smoothed time between grants while others wait."""
        now = asyncio.get_running_loop().time()
        if self._granted_at is not None:
            self._seconds_per_grant += 0.2 * (now - self._granted_at - self._seconds_per_grant)
        self._granted_at = now

    def _retry_after_s(self) -> int:
        return max(1, min(_MAX_RETRY_S, math.ceil(self._seconds_per_grant * self.num_waiting)))
