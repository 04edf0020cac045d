"""Responses that are generated without a client: their tasks, and the events that clients may follow."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any

from telemetry.logs import EventLogger
from wire.errors import DeadlineExceeded

_log = EventLogger("responses")
END_S = 15.0


class BackgroundRun:
    """One running response; `head` is its object before the first token. `events`: None if not to be followed."""

    def __init__(self, head: Mapping[str, Any], *, streams: bool) -> None:
        self.started = self.done = False
        self.events: list[bytes] | None = [] if streams else None
        self._head = head
        self._changed = asyncio.Event()

    def shown(self) -> Mapping[str, Any]:
        """Return the response while it runs."""
        return {**self._head, "status": "in_progress" if self.started else "queued"}

    def write(self, content: bytes) -> None:
        """Add events; comments in the stream are not events."""
        events = split_events(content)
        self.started = self.started or bool(events)
        if self.events is not None:
            self.events += events
            self._wake()

    def end(self) -> None:
        """Mark the response as done and stored."""
        self.done = True
        self._wake()

    async def follow(self, first: int) -> AsyncIterator[bytes]:
        """Yield the events from number `first` on, several at once, until the end."""
        assert self.events is not None, "only streams are followed"
        while True:
            changed, events, done = self._changed, self.events[first:], self.done
            if events:
                first += len(events)
                yield b"".join(events)
            elif done:
                return
            else:
                await changed.wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def split_events(content: bytes) -> list[bytes]:
    """Return the events of a part of a stream; their position is their sequence number."""
    return [part + b"\n\n" for part in content.split(b"\n\n")[:-1] if not part.startswith(b":")]


class BackgroundRuns:
    """Owner of the tasks, by the id of their response."""

    def __init__(self) -> None:
        self._runs: dict[str, tuple[BackgroundRun, asyncio.Task[None]]] = {}

    def start(self, response_id: str, run: BackgroundRun, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, which stores the response at its end, also if it is cancelled."""
        task = asyncio.create_task(work)
        self._runs[response_id] = run, task
        task.add_done_callback(lambda done: self._ended(response_id, run, done))

    def find(self, response_id: str) -> BackgroundRun | None:
        """Return a response that is not done, None if none with this id runs here."""
        found = self._runs.get(response_id)
        return None if found is None else found[0]

    async def cancel(self, response_id: str) -> None:
        """Cancel a response and wait until it is stored. Raises DeadlineExceeded."""
        if response_id in self._runs:
            _, task = self._runs[response_id]
            task.cancel()
            if not (await asyncio.wait((task,), timeout=END_S))[0]:
                raise DeadlineExceeded(f"the response did not end within {END_S:g} s")

    async def close(self) -> None:
        """Cancel all and wait until they are stored."""
        tasks = [task for _, task in self._runs.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=END_S)

    def _ended(self, response_id: str, run: BackgroundRun, task: asyncio.Task[None]) -> None:
        del self._runs[response_id]
        run.end()
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("background_response_failed", error, response_id=response_id)
