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
from wire.grpc_proof import Door, Metadata, prove
from wire.messages import Command, Event, OpenSession
from wire.trust import Trust
from wire.types import InstanceDescription

log = EventLogger("wire")

FIRST_COMMAND_S = 10.0

_EOF: Any = vars(grpc.aio)["EOF"]  # the stubs lack it


class GrpcConnection:
    """The way to one instance at `address` ("host:port"); every call proves what `trust` holds."""

    def __init__(self, address: str, trust: Trust | None = None) -> None:
        self.address = address
        self._trust = trust or Trust()
        self._channel = _channel(address, self._trust)
        self._stub: Any = pb_grpc.InstanceStub(self._channel)

    async def describe(self, timeout_s: float) -> InstanceDescription:
        """Ask what the instance is; the deadline covers the proof too."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        metadata = await self._prove("Describe", timeout_s)
        try:
            left_s = max(0.0, deadline - loop.time())
            call = self._stub.Describe(pb.DescribeRequest(), timeout=left_s, metadata=metadata)
            return description_from_pb(await call)
        except grpc.aio.AioRpcError as error:
            raise _translate(error, self.address) from error

    async def open(self, hello: OpenSession, timeout_s: float) -> "GrpcSession":
        """Open a session; the deadline covers the proof and the first event, which is read here."""
        session: GrpcSession | None = None
        try:
            async with asyncio.timeout(timeout_s):
                metadata = await self._prove("Session", timeout_s)
                session = GrpcSession(self._stub.Session(metadata=metadata), self.address)
                await session.send(hello)
                await session.read_first()
        except TimeoutError as error:
            await _close(session)
            raise DeadlineExceeded(f"{self.address} did not open a session within {timeout_s} s") from error
        except BaseException:
            await _close(session)
            raise
        return session

    async def close(self) -> None:
        """Release the channel."""
        await self._channel.close(grace=None)

    async def _prove(self, method: str, timeout_s: float) -> Metadata:
        try:
            return await prove(self._stub, method, self._trust, self.address, timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _translate(error, self.address) from error


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
            # The call was cancelled by `close`, or our task by its owner, or both: only the first is an ending here.
            task = asyncio.current_task()
            if self._closed and (task is None or not task.cancelling()):
                return None
            raise
        return None if message is _EOF else event_from_pb(message)


class _Servicer(pb_grpc.InstanceServicer):
    """Moves messages between streams and an InstanceService; until there is one, it says that it loads."""

    def __init__(self, door: Door, first_command_s: float) -> None:
        self.service: InstanceService | None = None
        self._door, self._first_command_s = door, first_command_s

    async def Challenge(self, request: pb.ChallengeRequest, context: Any) -> pb.ChallengeReply:
        """Prove the cluster secret and give a nonce."""
        return await self._door.challenge(request, context)

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.InstanceDescription:
        """Answer what the instance is."""
        await self._door.admit(context, "Describe")
        return description_to_pb((await self._loaded(context)).describe())

    async def Session(self, requests: AsyncIterator[pb.CommandMessage], context: Any) -> AsyncIterator[Any]:
        """Serve one session: the first command opens it, a reader feeds it, its events go out."""
        await self._door.admit(context, "Session")
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
            async with asyncio.timeout(self._first_command_s):
                message = await anext(aiter(requests))
            hello = command_from_pb(message)
            if not isinstance(hello, OpenSession):
                raise InvalidRequest(f"a session begins with OpenSession, not {type(hello).__name__}")
            return (await self._loaded(context)).open(hello)
        except TimeoutError:
            words = f"no command within {self._first_command_s:g} s of the session's start"
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, words)
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

    def __init__(
        self, host: str, port: int, trust: Trust | None = None, *, first_command_s: float = FIRST_COMMAND_S
    ) -> None:
        self._host, self._port = host, port
        self._trust = trust or Trust()
        self._server: Any = None
        self._servicer = _Servicer(Door(self._trust), first_command_s)
        self._health: Any = vars(health)["aio"].HealthServicer()  # the stubs lack aio

    async def start(self) -> int:
        """Take the port and answer that the instance is loading; return the port's number."""
        self._server = grpc.aio.server(options=list(SERVER_OPTIONS))
        where = f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"
        try:
            port = self._take_port(where)
        except RuntimeError as error:
            raise ConfigError(f"--port {self._port} on {self._host} cannot be taken: it is in use") from error
        pb_grpc.add_InstanceServicer_to_server(self._servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        await self.set_healthy(False)
        await self._server.start()
        return port

    def _take_port(self, where: str) -> int:
        if self._trust.tls is None:
            return int(self._server.add_insecure_port(where))
        return int(self._server.add_secure_port(where, self._trust.tls.server_credentials()))

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


def _channel(address: str, trust: Trust) -> grpc.aio.Channel:
    if trust.tls is None:
        return grpc.aio.insecure_channel(address, options=list(CHANNEL_OPTIONS))
    return grpc.aio.secure_channel(address, trust.tls.channel_credentials(), options=list(CHANNEL_OPTIONS))


async def _close(session: GrpcSession | None) -> None:
    if session is not None:
        await session.close()


def _translate(error: grpc.aio.AioRpcError, address: str) -> PdserveError:
    words = f"{address}: {error.details() or error.code().name}"
    match error.code():
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(words)
        case grpc.StatusCode.FAILED_PRECONDITION:
            return Incompatible(error.details() or address)
        case grpc.StatusCode.PERMISSION_DENIED | grpc.StatusCode.UNIMPLEMENTED:
            return Incompatible(words)
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidRequest(words)
        case _:
            return InstanceLost(words)
