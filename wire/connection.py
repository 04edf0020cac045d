"""The interface between scheduler and instance: gRPC between processes, plain queues inside one.

Both implementations (`rpc/grpc_connection.py`, `wire/inprocess.py`) pass the same contract tests. A third, over the
HTTP API of vLLM workers (`scheduler/workers/connection.py`), implements only the scheduler's side.
"""

from collections.abc import AsyncIterator
from typing import Protocol

from wire.description import InstanceDescription
from wire.errors import InvalidRequest
from wire.messages import Command, Event, OpenSession


class Session(Protocol):
    """One open session. `send` never waits for the peer's work; events arrive in the order they were emitted."""

    async def send(self, *commands: Command) -> None:
        """Queue commands, in order. Raises InstanceLost once the session has ended."""
        ...

    def events(self) -> AsyncIterator[Event]:
        """Yield events until the session ends: normally after `close`, with InstanceLost when the peer is gone."""
        ...

    async def close(self) -> None:
        """End the session; the instance ends all work of the session."""
        ...


class Connection(Protocol):
    """A connection to one instance."""

    async def describe(self, timeout_s: float) -> InstanceDescription:
        """Fetch the instance's description. Raises InstanceLost or DeadlineExceeded."""
        ...

    async def open(self, hello: OpenSession, timeout_s: float) -> Session:
        """Open a session; its first event is SessionOpen. Raises InstanceLost, Incompatible or DeadlineExceeded."""
        ...

    async def close(self) -> None:
        """Release the channel."""
        ...


class InstanceService(Protocol):
    """The instance's side of the interface: what a server (gRPC or in-process) calls."""

    def describe(self) -> InstanceDescription:
        """Return what this instance is."""
        ...

    def open(self, hello: OpenSession) -> "ServedSession":
        """Accept a session and end an older one of its scheduler. Raises Incompatible."""
        ...


class ServedSession(Protocol):
    """One session on the instance's side. Called on the event loop's thread only."""

    def handle(self, command: Command) -> None:
        """Process one command; never blocks, answers with events."""
        ...

    def refuse(self, prompt_id: str, error: InvalidRequest) -> None:
        """Answer Refused to a command that cannot be processed."""
        ...

    def events(self) -> AsyncIterator[list[Event]]:
        """Yield the session's events, SessionOpen first, until it ends; a batch has all since the previous batch."""
        ...

    def lost(self) -> None:
        """End all work of this session because the scheduler is gone. Idempotent."""
        ...
