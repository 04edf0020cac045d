"""The queue of the cluster: prompts wait here, first in first out, until placement finds them room.

Bounded in prompts and in tokens. A request of many prompts lets others in between its own. Where the head finds no
room, the next few may pass it, but only so often: then all wait for it, so a large prompt is not passed for ever.
"""

import asyncio
import bisect
import math
from collections.abc import Callable

from scheduler.grants import Grant
from scheduler.limits import ControlLimits
from scheduler.loads import PromptFacts
from wire.errors import Overloaded, PdserveError

_MOST_RETRY_S = 60
_GRANTS_A_TURN = 4
"""A request's second prompt queues as if it had come after four grants more, its third after eight, and so on."""
_WINDOW = 8
_MOST_PASSED = 16


class Waiting:
    """One prompt's place in the queue. `turn` counts the prompts of its own request before it.

    `due` is the number of grants after which it is its turn; `passed` how often others were granted before it since.
    """

    def __init__(self, prompt_id: str, facts: PromptFacts, turn: int = 0) -> None:
        self.prompt_id = prompt_id
        self.facts = facts
        self.turn = turn
        self.due = 0
        self.passed = 0
        self.grant: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()


TryPlace = Callable[[str, PromptFacts], Grant | None]


class Admission:
    """Owns the queue. `try_place` books and returns a grant, or None to wait; it raises what ends the prompt."""

    def __init__(self, limits: ControlLimits, try_place: TryPlace) -> None:
        self._limits = limits
        self._try_place = try_place
        self._queue: list[Waiting] = []  # by `due`
        self._num_granted = 0
        self._granted_at: float | None = None
        self._seconds_per_grant = 0.0

    @property
    def num_waiting(self) -> int:
        """Prompts in the queue."""
        return len(self._queue)

    @property
    def waiting_tokens(self) -> int:
        """Their prompt tokens."""
        return sum(waiting.facts.num_tokens for waiting in self._queue)

    def check_room(self, num_prompts: int, num_tokens: int) -> None:
        """Raise Overloaded if these do not fit behind what already waits."""
        prompts, tokens = self.num_waiting + num_prompts, self.waiting_tokens + num_tokens
        most_prompts, most_tokens = self._limits.max_queued_requests, self._limits.max_queued_tokens
        if self._queue and (prompts > most_prompts or tokens > most_tokens):
            raise Overloaded(
                f"the queue is full: with this request {prompts} prompts (limit {most_prompts}) and {tokens} prompt "
                f"tokens (limit {most_tokens}) would wait",
                self._retry_after_s(),
            )

    def enter(self, waiting: Waiting, *, front: bool = False) -> None:
        """Put a prompt into the queue by its turn, or back at its front."""
        waiting.due = -1 if front else self._num_granted + _GRANTS_A_TURN * waiting.turn
        insort = bisect.insort_left if front else bisect.insort_right
        insort(self._queue, waiting, key=_due)
        self.pump()

    def leave(self, waiting: Waiting) -> None:
        """Take a prompt out, whether it waits or was granted. Idempotent."""
        if waiting in self._queue:
            self._queue.remove(waiting)
            waiting.grant.cancel()
            self.pump()
        elif waiting.grant.done() and not waiting.grant.cancelled() and waiting.grant.exception() is None:
            waiting.grant.result().release()

    def pump(self) -> None:
        """Grant from the head while there is room; called whenever a load, a booking or a member changed."""
        at = 0
        while at < min(len(self._queue), _WINDOW):
            waiting = self._queue[at]
            if not waiting.grant.done():  # done: cancelled while it waited; its request is about to leave
                self._try(waiting, at)
            if waiting.grant.done():
                del self._queue[at]
            elif waiting.passed >= _MOST_PASSED:
                return
            else:
                at += 1

    def _try(self, waiting: Waiting, at: int) -> None:
        try:
            grant = self._try_place(waiting.prompt_id, waiting.facts)
        except PdserveError as error:
            waiting.grant.set_exception(error)
            return
        if grant is not None:
            waiting.grant.set_result(grant)
            self._note_grant(at)

    def _note_grant(self, at: int) -> None:
        """Count it against those it passed; learn the smoothed time between grants while others wait."""
        self._num_granted += 1
        for passed in self._queue[:at]:
            passed.passed += 1
        now = asyncio.get_running_loop().time()
        if self._granted_at is not None:
            self._seconds_per_grant += 0.2 * (now - self._granted_at - self._seconds_per_grant)
        self._granted_at = now if len(self._queue) > 1 else None

    def _retry_after_s(self) -> int:
        return max(1, min(_MOST_RETRY_S, math.ceil(self._seconds_per_grant * len(self._queue))))


def _due(waiting: Waiting) -> int:
    return waiting.due
