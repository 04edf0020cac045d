"""The scheduler/instance interface inside one process: the same Protocols as plain calls on one event loop."""

import asyncio
from collections.abc import AsyncIterator

from wire.check_prompt import check_prompt
from wire.connection import InstanceService, ServedSession
from wire.description import InstanceDescription
from wire.errors import InstanceLost, InvalidRequest
from wire.messages import Command, Event, OpenSession, PromptCommand


class InProcessConnection:
    """A connection to an instance in this process."""

    def __init__(self, service: InstanceService) -> None:
        self._service = service

    async def describe(self, timeout_s: float) -> InstanceDescription:
        """Return the instance's description; never waits."""
        return self._service.describe()

    async def open(self, hello: OpenSession, timeout_s: float) -> "InProcessSession":
        """Open a session; never waits."""
        return InProcessSession(self._service.open(hello))

    async def close(self) -> None:
        """Nothing to release."""


class InProcessSession:
    """One open session."""

    def __init__(self, served: ServedSession) -> None:
        self._served = served
        self._closed = False

    async def send(self, *commands: Command) -> None:
        """Pass the commands to the instance in order, checked like those received over gRPC."""
        if self._closed:
            raise InstanceLost("the session to the instance in this process is over")
        for command in commands:
            self._handle_command(command)

    def _handle_command(self, command: Command) -> None:
        if isinstance(command, PromptCommand):
            try:
                check_prompt(command.prompt)
            except InvalidRequest as error:
                self._served.refuse(command.prompt.prompt_id, error)
                return
        self._served.handle(command)

    async def events(self) -> AsyncIterator[Event]:
        """Yield events until the session ends."""
        async for events in self._served.events():
            for event in events:
                yield event
        if not self._closed:
            raise InstanceLost("the instance in this process ended the session")

    async def close(self) -> None:
        """End the session."""
        self._closed = True
        self._served.lost()
        await asyncio.sleep(0)
