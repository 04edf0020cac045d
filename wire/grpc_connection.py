"""The seam scheduler/instance over gRPC: the scheduler's `GrpcConnection` and the server that serves an instance.

One bidirectional stream a session. The server's half only moves messages; the instance decides (InstanceService).
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from telemetry.logs import EventLogger
from wire import cluster_pb2 as pb
from wire import cluster_pb2_grpc as pb_grpc
from wire.channel import CHANNEL_OPTIONS, SERVER_OPTIONS
from wire.connection import InstanceService, ServedSession
from wire.convert import description_from_pb, description_to_pb
from wire.convert_messages import command_from_pb, command_to_pb, event_from_pb, event_to_pb
from wire.errors import (
    ConfigError,
    DeadlineExceeded,
    Incompatible,
    InstanceLost,
    InvalidRequest,
    PdserveError,
    appearance,
)
from wire.messages import Command, Event, OpenSession
from wire.types import InstanceDescription

log = EventLogger("wire")

_EOF: Any = vars(grpc.aio)["EOF"]  # the stubs lack it


class GrpcConnection:
    """The way to one instance at `address` ("host:port")."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = grpc.aio.insecure_channel(address, options=list(CHANNEL_OPTIONS))
        self._stub: Any = pb_grpc.InstanceStub(self._channel)

    async def describe(self, timeout_s: float) -> InstanceDescription:
        """Ask what the instance is."""
        try:
            return description_from_pb(await self._stub.Describe(pb.DescribeRequest(), timeout=timeout_s))
        except grpc.aio.AioRpcError as error:
            raise _translate(error, self.address) from error

    async def open(self, hello: OpenSession, timeout_s: float) -> "GrpcSession":
        """Open a session; the deadline covers its first event, which is read here."""
        call = self._stub.Session()
        session = GrpcSession(call, self.address)
        try:
            async with asyncio.timeout(timeout_s):
                await session.send(hello)
                await session.read_first()
        except TimeoutError as error:
            await session.close()
            raise DeadlineExceeded(f"{self.address} did not open a session within {timeout_s} s") from error
        except PdserveError:
            await session.close()
            raise
        return session

    async def close(self) -> None:
        """Release the channel."""
        await self._channel.close(grace=None)


class GrpcSession:
    """One open session over a stream."""

    def __init__(self, call: Any, address: str) -> None:
        self._call = call
        self._address = address
        self._first: Event | None = None
        self._closed = False
        self._writing = asyncio.Lock()  # a stream takes one write at a time

    async def send(self, command: Command) -> None:
        """Write one command to the stream."""
        try:
            async with self._writing:
                await self._call.write(command_to_pb(command))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise InstanceLost(f"the session to {self._address} is over") from error

    async def read_first(self) -> None:
        """Wait for the first event and keep it for `events`."""
        self._first = await self._read()
        if self._first is None:
            raise InstanceLost(f"{self._address} ended the session before it began")

    async def events(self) -> AsyncIterator[Event]:
        """Yield events until the stream ends."""
        if self._first is not None:
            yield self._first
        while (event := await self._read()) is not None:
            yield event
        if not self._closed:
            raise InstanceLost(f"{self._address} ended the session")

    async def close(self) -> None:
        """Cancel the stream: the instance sees it at once."""
        self._closed = True
        self._call.cancel()

    async def _read(self) -> Event | None:
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            if self._closed:
                return None
            raise _translate(error, self._address) from error
        except asyncio.CancelledError:
            if self._closed:
                return None
            raise
        return None if message is _EOF else event_from_pb(message)


class _Servicer(pb_grpc.InstanceServicer):
    """Moves messages between streams and an InstanceService; until there is one, it says that it loads."""

    def __init__(self) -> None:
        self.service: InstanceService | None = None

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.InstanceDescription:
        """Answer what the instance is."""
        return description_to_pb((await self._loaded(context)).describe())

    async def Session(self, requests: AsyncIterator[pb.CommandMessage], context: Any) -> AsyncIterator[Any]:
        """Serve one session: the first command opens it, a reader feeds it, its events go out."""
        session = await self._open(requests, context)
        reader = asyncio.create_task(_feed(session, requests))
        try:
            async for event in session.events():
                yield event_to_pb(event)
        finally:
            reader.cancel()
            session.lost()

    async def _loaded(self, context: Any) -> InstanceService:
        if self.service is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "it is loading its model")
        assert self.service is not None
        return self.service

    async def _open(self, requests: AsyncIterator[pb.CommandMessage], context: Any) -> ServedSession:
        try:
            hello = command_from_pb(await anext(aiter(requests)))
            if not isinstance(hello, OpenSession):
                raise InvalidRequest(f"a session begins with OpenSession, not {type(hello).__name__}")
            return (await self._loaded(context)).open(hello)
        except StopAsyncIteration:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a session without a command")
        except PdserveError as error:
            await context.abort(grpc.StatusCode[appearance(error).grpc_status], str(error))
        raise AssertionError("abort raises")


async def _feed(session: ServedSession, requests: AsyncIterator[pb.CommandMessage]) -> None:
    try:
        async for message in requests:
            try:
                session.handle(command_from_pb(message))
            except InvalidRequest as error:
                log.warning("command_refused", error=error)
    finally:
        session.lost()


class GrpcServer:
    """Listens for schedulers from `start` on (a busy port is a ConfigError); answers for real once it has a service."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._server: Any = None
        self._servicer = _Servicer()
        self._health: Any = vars(health)["aio"].HealthServicer()  # the stubs lack aio

    async def start(self) -> int:
        """Take the port and answer that the instance is loading; return the port's number."""
        self._server = grpc.aio.server(options=list(SERVER_OPTIONS))
        where = f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"
        try:
            port = int(self._server.add_insecure_port(where))
        except RuntimeError as error:
            raise ConfigError(f"--port {self._port} on {self._host} cannot be taken: it is in use") from error
        pb_grpc.add_InstanceServicer_to_server(self._servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        await self.set_healthy(False)
        await self._server.start()
        return port

    async def serve(self, service: InstanceService) -> None:
        """From now on answer with `service`."""
        self._servicer.service = service
        await self.set_healthy(True)

    async def set_healthy(self, healthy: bool) -> None:
        """Answer the standard gRPC health service so, for the whole server."""
        status = health_pb2.HealthCheckResponse.SERVING if healthy else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set("", status)

    async def stop(self, grace_s: float) -> None:
        """End all sessions and free the port."""
        if self._server is not None:
            await self._server.stop(grace_s)


def _translate(error: grpc.aio.AioRpcError, address: str) -> PdserveError:
    words = f"{address}: {error.details() or error.code().name}"
    match error.code():
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(words)
        case grpc.StatusCode.FAILED_PRECONDITION:
            return Incompatible(error.details() or address)
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidRequest(words)
        case _:
            return InstanceLost(words)
