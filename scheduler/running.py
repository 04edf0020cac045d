"""One request under way as its client sees it: the events that wait to be read, and the way to stop."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from scheduler.request import NewToken, PathEvent
from telemetry.logs import EventLogger
from wire.errors import InternalError, PdserveError
from wire.types import FinishReason

log = EventLogger("requests")


class Running:
    """Owns the events made and not yet read. Implements scheduler.request.RunningRequest."""

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
        self._is_awaited = False  # whoever reads has read all and waits

    def bind(self, *, cancel: Callable[[], None], stop: Callable[[int, int], None]) -> None:
        """Say how the work behind it is cancelled and how one of its sequences is stopped."""
        self._cancel = cancel
        self._stop = stop

    def put(self, event: PathEvent) -> None:
        """Add an event; tokens of a sequence whose client has stopped it are dropped."""
        if isinstance(event, NewToken):
            key = (event.prompt, event.sequence)
            if key in self._closed or (event.finish is None and self._is_awaited and self._hand_over(event, key)):
                return
        self._events.append(event)
        self._wake()

    def finish(self, error: PdserveError | None) -> None:
        """The work is over; what was put before is still read."""
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
        """End one sequence after the last token read: its next event has finish STOP and no token."""
        key = (prompt, sequence)
        if key in self._closed:
            return
        self._closed.add(key)
        index = self._next_index.get(key, 0)
        self._replace_unread(NewToken(prompt, sequence, index, None, FinishReason.STOP))
        self._stop(prompt, sequence)

    def divert(self, taker: Callable[[NewToken], bool]) -> None:
        """Hand tokens to `taker` as they come, while whoever reads waits for the next event."""
        self._taker = taker

    def _hand_over(self, event: NewToken, key: tuple[int, int]) -> bool:
        """Return whether the taker has the event. Should it break, this request fails, not the one who put it."""
        if self._taker is None:
            return False
        self._next_index[key] = event.index + 1
        try:
            return self._taker(event)
        except Exception as error:  # noqa: BLE001 - a frame above is the session of all of an instance's requests
            log.error("token_not_taken", error)
            self._taker = None
            self.finish(InternalError("a token could not be told; details are in the scheduler's log"))
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
        """Drop the sequence's unread tokens; `stop` takes the place of the first, so it stands before PromptDone."""
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
