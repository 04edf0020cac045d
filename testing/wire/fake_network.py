"""An in-memory network of instances that listen late, are killed or freeze."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from wire.connection import InstanceService, Session
from wire.description import InstanceDescription
from wire.errors import DeadlineExceeded, InstanceLost
from wire.inprocess import InProcessConnection
from wire.messages import Command, Event, OpenSession


class FakeNetwork:
    """Owner of the listeners by address. A registry dials with `connect`."""

    def __init__(self) -> None:
        self.dials: list[str] = []
        self._hosts: dict[str, _Host] = {}

    def listen(self, address: str, service: InstanceService) -> None:
        """Start an instance at an address."""
        self._hosts[address] = _Host(service)

    def kill(self, address: str) -> None:
        """Simulate kill -9: sessions break, nothing listens any more."""
        self._hosts.pop(address).gone.set()

    def reset(self, address: str) -> None:
        """Break the open sessions on both sides; the instance continues, and listens."""
        before = self._hosts[address]
        self._hosts[address] = _Host(before.service)
        before.was_reset = True
        before.gone.set()

    def freeze(self, address: str) -> None:
        """Simulate SIGSTOP: connections stay open, nothing is processed."""
        self._hosts[address].moving.clear()

    def thaw(self, address: str) -> None:
        """Simulate SIGCONT."""
        self._hosts[address].moving.set()

    def connect(self, address: str) -> "FakeConnection":
        """Return a connection to an address."""
        return FakeConnection(self, address)

    def reach(self, address: str) -> "_Host":
        """Return the listening host. Raises InstanceLost."""
        self.dials.append(address)
        if address not in self._hosts:
            raise InstanceLost(f"nothing listens at {address}")
        return self._hosts[address]


class _Host:
    """One process: `gone` once killed, or once its connections were reset, `moving` unless stopped."""

    def __init__(self, service: InstanceService) -> None:
        self.service = service
        self.was_reset = False
        self.gone = asyncio.Event()
        self.moving = asyncio.Event()
        self.moving.set()


class FakeConnection:
    """A connection to one address. Implements wire.connection.Connection."""

    def __init__(self, network: FakeNetwork, address: str) -> None:
        self._network = network
        self._address = address

    async def describe(self, timeout_s: float) -> InstanceDescription:
        """Fetch the instance's description."""
        host = await self._reach_host(timeout_s)
        return await InProcessConnection(host.service).describe(timeout_s)

    async def open(self, hello: OpenSession, timeout_s: float) -> Session:
        """Open a session."""
        host = await self._reach_host(timeout_s)
        return FakeSession(host, await InProcessConnection(host.service).open(hello, timeout_s), self._address)

    async def close(self) -> None:
        """Nothing to release."""

    async def _reach_host(self, timeout_s: float) -> _Host:
        host = self._network.reach(self._address)
        try:
            async with asyncio.timeout(timeout_s):
                await host.moving.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"no answer from {self._address} within {timeout_s:g} s") from None
        return host


class FakeSession:
    """A session that breaks with its host and stalls while it is frozen. Implements wire.connection.Session."""

    def __init__(self, host: _Host, inner: Session, address: str) -> None:
        self._host = host
        self._inner = inner
        self._address = address
        self._unread: deque[Command] = deque()

    async def send(self, *commands: Command) -> None:
        """Queue commands; a frozen host reads them from its socket when it resumes."""
        if self._host.gone.is_set():
            raise InstanceLost(f"connection to {self._address} was reset")
        if self._host.moving.is_set():
            await self._inner.send(*commands)
        else:
            self._unread.extend(commands)

    async def events(self) -> AsyncIterator[Event]:
        """Yield events until the host dies."""
        events = aiter(self._inner.events())
        gone = asyncio.ensure_future(self._host.gone.wait())
        try:
            while True:
                event = asyncio.ensure_future(anext(events))
                try:
                    await asyncio.wait((event, gone), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    if not event.done() or gone.done():
                        event.cancel()
                if gone.done():
                    raise InstanceLost(f"connection to {self._address} was reset")
                await self._host.moving.wait()
                await self._read_backlog()
                yield event.result()
        except StopAsyncIteration:
            return
        finally:
            gone.cancel()

    async def _read_backlog(self) -> None:
        while self._unread:
            await self._inner.send(self._unread.popleft())

    async def close(self) -> None:
        """End the session; a dead host has ended it already."""
        if self._host.was_reset or not self._host.gone.is_set():
            await self._inner.close()
