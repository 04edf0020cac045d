"""The queue of the cluster: prompts wait here, first in first out, until placement finds them room.

Bounded in prompts and in tokens. The head alone is placed, so a long prompt is not overtaken for ever.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable

from scheduler.grants import Grant
from scheduler.limits import ControlLimits
from scheduler.placement import PromptFacts
from wire.errors import Overloaded, PdserveError

_MOST_RETRY_S = 60


class Waiting:
    """One prompt's place in the queue."""

    def __init__(self, prompt_id: str, facts: PromptFacts) -> None:
        self.prompt_id = prompt_id
        self.facts = facts
        self.grant: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()


TryPlace = Callable[[str, PromptFacts], Grant | None]


class Admission:
    """Owns the queue. `try_place` books and returns a grant, or None to wait; it raises what ends the prompt."""

    def __init__(self, limits: ControlLimits, try_place: TryPlace) -> None:
        self._limits = limits
        self._try_place = try_place
        self._queue: deque[Waiting] = deque()
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
        """Put a prompt at the end of the queue, or back at its front."""
        if front:
            self._queue.appendleft(waiting)
        else:
            self._queue.append(waiting)
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
        while self._queue:
            waiting = self._queue[0]
            if waiting.grant.done():  # cancelled while it waited; its request is about to leave
                self._queue.popleft()
                continue
            try:
                grant = self._try_place(waiting.prompt_id, waiting.facts)
            except PdserveError as error:
                self._queue.popleft()
                waiting.grant.set_exception(error)
                continue
            if grant is None:
                return
            self._queue.popleft()
            waiting.grant.set_result(grant)
            self._note_grant()

    def _note_grant(self) -> None:
        """Learn how fast the queue moves: the smoothed time between grants while others wait."""
        now = asyncio.get_running_loop().time()
        if self._granted_at is not None:
            self._seconds_per_grant += 0.2 * (now - self._granted_at - self._seconds_per_grant)
        self._granted_at = now if self._queue else None

    def _retry_after_s(self) -> int:
        return max(1, min(_MOST_RETRY_S, math.ceil(self._seconds_per_grant * len(self._queue))))
