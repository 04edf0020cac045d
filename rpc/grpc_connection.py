"""The scheduler's side of the scheduler/instance interface over gRPC: one bidirectional stream per session.

The server's side is rpc/grpc_server.py.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
import grpc.aio

from rpc.channel import CHANNEL_OPTIONS, LOADING, MAX_MESSAGE_BYTES
from rpc.image_files import images_of, pieces
from rpc.packing import pack
from security.grpc_proof import Metadata, prove
from security.trust import Trust
from wire import cluster_pb2 as pb
from wire import cluster_pb2_grpc as pb_grpc
from wire.convert import description_from_pb
from wire.convert_messages import command_to_pb, event_from_pb
from wire.description import InstanceDescription
from wire.errors import DeadlineExceeded, Incompatible, InstanceLost, InvalidRequest, Loading, PdserveError
from wire.messages import Command, Event, OpenSession, PromptCommand, Refused
from wire.prompt_images import MAX_IMAGE_BYTES, num_data_bytes

_EOF: Any = vars(grpc.aio)["EOF"]  # the stubs lack it
_UNREACHED, _BROKEN = "failed to connect to all addresses", ("Socket closed", "recvmsg:", "sendmsg:")
_LATE = "Deadline Exceeded"
_WHY_UNREACHED = (
    ("Connection refused", "nothing is listening there"),
    ("No route to host", "there is no route to that host"),
    ("Network is unreachable", "that network is unreachable"),
    ("Timeout occurred", "it does not answer"),
)


class GrpcConnection:
    """A gRPC connection to one instance at `address` ("host:port"); `trust` provides the proof sent with every call."""

    def __init__(self, address: str, trust: Trust | None = None) -> None:
        self.address = address
        self._trust = trust or Trust()
        self._channel = _open_channel(address, self._trust)
        self._stub: Any = pb_grpc.InstanceStub(self._channel)

    async def describe(self, timeout_s: float) -> InstanceDescription:
        """Fetch the instance's description; the deadline covers the proof too."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        metadata = await self._proof_metadata("Describe", timeout_s)
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
                metadata = await self._proof_metadata("Session", timeout_s)
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

    async def _proof_metadata(self, method: str, timeout_s: float) -> Metadata:
        try:
            return await prove(self._stub, method, self._trust, self.address, timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _translate(error, self.address) from error


class GrpcSession:
    """One open session over a stream."""

    def __init__(self, call: Any, address: str) -> None:
        self._call = call
        self._address = address
        self._first: list[Event] | None = None
        self._closed = False
        self._writing = asyncio.Lock()  # a stream allows one write at a time
        self._refused: deque[Refused] = deque()

    async def send(self, *commands: Command) -> None:
        """Write commands to the stream. A prompt over the message limit would break the stream: it is refused."""
        messages = [(one, message) for one in commands if (message := self._message(one)) is not None]
        try:
            async with self._writing:
                waiting: list[pb.CommandMessage] = []
                for command, message in messages:
                    if files := images_of(command):
                        await self._write(pack(waiting))
                        await self._write(pieces(files))
                        waiting = []
                    waiting.append(message)
                await self._write(pack(waiting))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise InstanceLost(f"the session to {self._address} is over") from error

    async def _write(self, messages: Iterable[pb.CommandMessage]) -> None:
        for message in messages:
            await self._call.write(message)

    def _message(self, command: Command) -> pb.CommandMessage | None:
        message = command_to_pb(command)
        if not isinstance(command, PromptCommand):
            return message
        for what, size, limit in (
            ("the images", num_data_bytes(images_of(command)), MAX_IMAGE_BYTES),
            ("the message to the instance", message.ByteSize(), MAX_MESSAGE_BYTES),
        ):
            if size > limit:
                error = InvalidRequest(f"{what} would have {size} bytes, but the limit is {limit}")
                self._refused.append(Refused.with_error(command.prompt.prompt_id, error))
                return None
        return message

    async def read_first(self) -> None:
        """Wait for the first events and keep them for `events`."""
        self._first = await self._read()
        if self._first is None:
            raise InstanceLost(f"{self._address} ended the session before it began")

    async def events(self) -> AsyncIterator[Event]:
        """Yield events until the stream ends; local refusals follow the next message (a heartbeat at the latest)."""
        for event in self._first or ():
            yield event
        while (events := await self._read()) is not None:
            for event in events:
                yield event
            while self._refused:
                yield self._refused.popleft()
        if not self._closed:
            raise InstanceLost(f"{self._address} ended the session")

    async def close(self) -> None:
        """Cancel the stream; the instance notices at once."""
        self._closed = True
        self._call.cancel()

    async def _read(self) -> list[Event] | None:
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            if self._closed:
                return None
            raise _translate(error, self._address) from error
        except asyncio.CancelledError:
            # Cancelled by `close`, by the owner of our task, or by both: only `close` alone ends the events normally.
            task = asyncio.current_task()
            if self._closed and (task is None or not task.cancelling()):
                return None
            raise
        return None if message is _EOF else [event_from_pb(one) for one in (message, *message.more)]


def _open_channel(address: str, trust: Trust) -> grpc.aio.Channel:
    if trust.tls is None:
        return grpc.aio.insecure_channel(address, options=list(CHANNEL_OPTIONS))
    return grpc.aio.secure_channel(address, trust.tls.channel_credentials(), options=list(CHANNEL_OPTIONS))


async def _close(session: GrpcSession | None) -> None:
    if session is not None:
        await session.close()


def _translate(error: grpc.aio.AioRpcError, address: str) -> PdserveError:
    text = f"{address}: {_readable_error(error.details() or error.code().name)}"
    match error.code():
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(text)
        case grpc.StatusCode.FAILED_PRECONDITION:
            return Incompatible(error.details() or address)
        case grpc.StatusCode.PERMISSION_DENIED | grpc.StatusCode.UNIMPLEMENTED:
            return Incompatible(text)
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidRequest(text)
        case grpc.StatusCode.UNAVAILABLE if error.details() == LOADING:
            return Loading(text)
        case _:
            return InstanceLost(text)


def _readable_error(details: str) -> str:
    """Replace gRPC's own text for network errors by plain English; an instance's text is returned unchanged."""
    if details.startswith(_UNREACHED):
        return next((text for part, text in _WHY_UNREACHED if part in details), "it cannot be reached")
    if details == _LATE:
        return "it does not answer in time"
    return "the connection broke" if details.startswith(_BROKEN) else details
