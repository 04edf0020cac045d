"""One running request for its client: the unread events, and the way to stop it."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from scheduler.request import NewToken, PathEvent
from telemetry.logs import EventLogger
from wire.errors import InternalError, PdserveError
from wire.types import FinishReason

log = EventLogger("requests")


class Running:
    """Owner of the unread events. Implements scheduler.request.RunningRequest."""

    def __init__(self) -> None:
        self._events: deque[PathEvent] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._over = False
        self._error: PdserveError | None = None
        self._next_index: dict[tuple[int, int], int] = {}
        self._closed: set[tuple[int, int]] = set()
        self._cancel: Callable[[], None] = _nothing
        self._stop: Callable[[int, int], None] = _nothing
        self._taker: Callable[[NewToken], bool] | None = None
        self._is_awaited = False  # the reader has read everything and waits

    def bind(self, *, cancel: Callable[[], None], stop: Callable[[int, int], None]) -> None:
        """Set the functions that cancel the request and stop one of its sequences."""
        self._cancel = cancel
        self._stop = stop

    def put(self, event: PathEvent) -> None:
        """Add an event; tokens of a stopped sequence are dropped."""
        if isinstance(event, NewToken):
            key = (event.prompt, event.sequence)
            if key in self._closed or (event.finish is None and self._is_awaited and self._hand_over(event, key)):
                return
        self._events.append(event)
        self._wake()

    def finish(self, error: PdserveError | None) -> None:
        """Mark the request as over; earlier events can still be read."""
        self._over, self._error = True, error
        self._wake()

    async def events(self) -> AsyncIterator[PathEvent]:
        """Yield events until every prompt is done; closing early cancels the request everywhere."""
        try:
            while True:
                while self._events:
                    yield self._read()
                if self._over:
                    break
                self._is_awaited = True
                self._reader = asyncio.get_running_loop().create_future()
                await self._reader
        finally:
            self._cancel()
        if self._error is not None:
            raise self._error

    def stop_sequence(self, prompt: int, sequence: int) -> None:
        """Stop one sequence after the last token read: its next event has finish STOP and no token."""
        key = (prompt, sequence)
        if key in self._closed:
            return
        self._closed.add(key)
        index = self._next_index.get(key, 0)
        self._replace_unread(NewToken(prompt, sequence, index, None, FinishReason.STOP))
        self._stop(prompt, sequence)

    def divert(self, taker: Callable[[NewToken], bool]) -> None:
        """Pass tokens directly to `taker` while the reader waits for the next event."""
        self._taker = taker

    def _hand_over(self, event: NewToken, key: tuple[int, int]) -> bool:
        """Return whether the taker took the event. If it raises, this request fails, not the caller of `put`."""
        if self._taker is None:
            return False
        self._next_index[key] = event.index + 1
        try:
            return self._taker(event)
        except Exception as error:  # noqa: BLE001 - the caller is the session shared by an instance's requests
            log.error("token_not_taken", error)
            self._taker = None
            self.finish(InternalError("a token could not be sent; details are in the scheduler's log"))
            self._cancel()
            return True

    def _wake(self) -> None:
        self._is_awaited = False
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)

    def _read(self) -> PathEvent:
        event = self._events.popleft()
        if isinstance(event, NewToken):
            key = (event.prompt, event.sequence)
            self._next_index[key] = event.index + 1
            if event.finish is not None:
                self._closed.add(key)
        return event

    def _replace_unread(self, stop: NewToken) -> None:
        """Drop the sequence's unread tokens; `stop` replaces the first, so that it precedes PromptDone."""
        unread = [
            isinstance(event, NewToken) and (event.prompt, event.sequence) == (stop.prompt, stop.sequence)
            for event in self._events
        ]
        place = unread.index(True) if True in unread else len(unread)
        kept = [event for event, drop in zip(self._events, unread, strict=True) if not drop]
        self._events = deque([*kept[:place], stop, *kept[place:]])
        self._wake()


def _nothing(*_: object) -> None:
    """Before `bind`."""
