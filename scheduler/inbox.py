"""One queue for the events of all instances about one prompt, and the prompt's handle on each instance."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from wire.errors import InstanceLost
from wire.messages import Cancel, Command, Failed, HandedOff, Pooled, Refused, Reserved
from wire.types import PromptLogprobs, StageTimes, TokenOutput


@dataclass(slots=True)  # not frozen, as TokenLogprobs
class PromptStep:
    """One prompt's part of a Step."""

    prompt_id: str
    tokens: tuple[TokenOutput, ...]
    times: StageTimes | None = None
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The session with the instance is over."""

    error: InstanceLost


@dataclass(frozen=True, slots=True)
class Stopped:
    """The scheduler itself ended a sequence."""


PromptEvent = Reserved | Refused | PromptStep | HandedOff | Pooled | Failed | SessionLost | Stopped


@dataclass(slots=True)  # not frozen, as TokenLogprobs
class Arrival:
    """One event and the work it belongs to (None: it is from the scheduler)."""

    work: "Work | None"
    event: PromptEvent


class Inbox:
    """The events of one prompt, in order. Owned by the one task that reads it.

    Waits with a deadline share one timer, which checks the last deadline only when it fires. An event that `taker`
    handles immediately, while no other is queued, wakes no reader.
    """

    def __init__(self) -> None:
        self._arrivals: deque[Arrival] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.taker: Callable[[Arrival], bool] | None = None

    def empty(self) -> bool:
        """Whether nothing is queued."""
        return not self._arrivals

    def put_nowait(self, arrival: Arrival) -> None:
        """Add an arrival, or pass it to `taker`."""
        if self.taker is not None and not self._arrivals and self.taker(arrival):
            return
        self._arrivals.append(arrival)
        self._wake(None)

    async def get(self, deadline: float) -> Arrival:
        """Return the next arrival. Raises TimeoutError when the loop's clock reaches `deadline` first."""
        while not self._arrivals:
            loop = asyncio.get_running_loop()
            self._deadline = deadline
            if self._timer is None or self._timer.when() > deadline:
                self._stop_timer()
                self._timer = loop.call_at(deadline, self._look)
            self._reader = loop.create_future()
            await self._reader
        return self._arrivals.popleft()

    def rest(self) -> None:
        """Stop the timer, and pass nothing to `taker` any more."""
        self.taker = None
        self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self._reader is None or self._reader.done():
            return
        loop = asyncio.get_running_loop()
        if loop.time() < self._deadline:
            self._timer = loop.call_at(self._deadline, self._look)
        else:
            self._wake(TimeoutError())

    def _wake(self, error: TimeoutError | None) -> None:
        reader, self._reader = self._reader, None
        if reader is None or reader.done():
            return
        if error is None:
            reader.set_result(None)
        else:
            reader.set_exception(error)


class Work:
    """One prompt on one instance.

    `ended`: the instance has reported, or implied, that it keeps nothing of the prompt. `stepping`: it is generating,
    so single sequences can be cancelled there; before that an instance can cancel only the whole prompt.
    `short_of_blocks`: the instance has prompts waiting for KV blocks, perhaps this one.
    """

    def __init__(
        self,
        name: str,
        prompt_id: str,
        inbox: Inbox,
        post: Callable[[Command], None],
        short_of_blocks: Callable[[], bool] = lambda: False,
    ) -> None:
        self.name = name
        self.short_of_blocks = short_of_blocks
        self.prompt_id = prompt_id
        self.ended = False
        self.stepping = False
        self._inbox = inbox
        self._post = post

    def post(self, command: Command) -> None:
        """Send a command; does nothing once the session is over (the inbox has got `SessionLost`)."""
        self._post(command)

    def cancel(self) -> None:
        """Cancel the prompt there, unless it has ended."""
        if not self.ended:
            self._post(Cancel(self.prompt_id))

    def cancel_sequence(self, sequence: int) -> None:
        """Cancel one sequence there, if it is generating."""
        if self.stepping and not self.ended:
            self._post(Cancel(self.prompt_id, sequence))

    def deliver(self, event: PromptEvent) -> None:
        """Add one event of the instance to the inbox."""
        if isinstance(event, Refused | HandedOff | Pooled | Failed | SessionLost):
            self.ended = True
        self._inbox.put_nowait(Arrival(self, event))
