"""One session served by a simulated instance: an outbox that may delay events, a heartbeat and the lease."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from wire.errors import InvalidRequest
from wire.load import LoadSnapshot
from wire.messages import Command, Event, Heartbeat, OpenSession, Refused, SessionOpen

_HEARTBEAT_S = 1.0


class SimulatedSession:
    """Owner of the events not yet sent. Implements wire.connection.ServedSession, and EventSink for its prompts."""

    def __init__(
        self,
        hello: OpenSession,
        opened: SessionOpen,
        *,
        load: Callable[[], LoadSnapshot],
        handle: "Callable[[SimulatedSession, Command], None]",
        ended: "Callable[[SimulatedSession], None]",
    ) -> None:
        self.hello = hello
        self._loop = asyncio.get_running_loop()
        self._load = load
        self._handle = handle
        self._ended = ended
        self._outbox: deque[tuple[float, Event]] = deque([(self._loop.time(), opened)])
        self._changed = asyncio.Event()
        self._has_ended = False
        self._last_message_at = self._loop.time()
        self._beat = self._loop.call_later(_HEARTBEAT_S, self._send_heartbeat)

    @property
    def ended(self) -> bool:
        """Whether the session is over."""
        return self._has_ended

    def handle(self, command: Command) -> None:
        """Process one command; commands that arrive after the session's end are dropped."""
        if not self._has_ended:
            self._last_message_at = self._loop.time()
            self._handle(self, command)

    def refuse(self, prompt_id: str, error: InvalidRequest) -> None:
        """Answer Refused to a command that cannot be processed."""
        if not self._has_ended:
            self._last_message_at = self._loop.time()
            self.emit(Refused.with_error(prompt_id, error))

    def emit(self, event: Event, *, lag_s: float = 0.0) -> None:
        """Send an event, `lag_s` from now."""
        self._outbox.append((self._loop.time() + lag_s, event))
        self._changed.set()

    async def events(self) -> AsyncIterator[list[Event]]:
        """Yield lists of all events that are due, SessionOpen first, until the session has ended."""
        while not self._has_ended:
            if not self._outbox:
                self._changed.clear()
                await self._changed.wait()
                continue
            due, event = self._outbox.popleft()
            if due > self._loop.time():
                await asyncio.sleep(due - self._loop.time())
            events = [event]
            while self._outbox and self._outbox[0][0] <= self._loop.time():
                events.append(self._outbox.popleft()[1])
            yield events

    def lost(self) -> None:
        """End the work of this session, except its streams, because the scheduler is gone. Idempotent."""
        if not self._has_ended:
            self._has_ended = True
            self._beat.cancel()
            self._changed.set()
            self._ended(self)

    def _send_heartbeat(self) -> None:
        if self._loop.time() - self._last_message_at > self.hello.lease_s:
            self.lost()
            return
        self.emit(Heartbeat(self._load()))
        self._beat = self._loop.call_later(_HEARTBEAT_S, self._send_heartbeat)
