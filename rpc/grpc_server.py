"""The gRPC server of an instance: it only transports messages; an InstanceService handles them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from rpc.channel import LOADING, SERVER_OPTIONS
from rpc.image_files import ImageFiles
from rpc.packing import pack
from security.grpc_proof import ProofCheck
from security.trust import Trust
from telemetry.logs import EventLogger
from wire import cluster_pb2 as pb
from wire.connection import InstanceService, ServedSession
from wire.convert import description_to_pb
from wire.convert_messages import command_from_pb, event_to_pb
from wire.errors import ConfigError, InvalidRequest, PdserveError, appearance
from wire.messages import Command, OpenSession

_log = EventLogger("wire")

FIRST_COMMAND_S = 10.0
LOADING_WAIT_S = 1.0

_Message = TypeVar("_Message", bound=Message)


class GrpcServer:
    """Listens for schedulers after `start`, which raises ConfigError if it cannot; serves once it has a service."""

    def __init__(
        self, host: str, port: int, trust: Trust | None = None, *, first_command_s: float = FIRST_COMMAND_S,
        loading_wait_s: float = LOADING_WAIT_S,
    ) -> None:  # fmt: skip
        """Calls that arrive before `serve` wait up to `loading_wait_s` for the service before they fail as loading."""
        self._host, self._port = host, port
        self._trust = trust or Trust()
        self._server: Any = None
        self._servicer = _Servicer(ProofCheck(self._trust), first_command_s, loading_wait_s)
        self._health: Any = vars(health)["aio"].HealthServicer()  # the stubs lack aio

    async def start(self) -> int:
        """Bind the port and answer that the instance is loading; return the port number."""
        self._server = grpc.aio.server(options=list(SERVER_OPTIONS))
        where = f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"
        try:
            port = self._bind_port(where)
        except RuntimeError as error:
            why = "the port is in use, or the address is not one of this host"
            raise ConfigError(f"--port {self._port} on {self._host} cannot be bound: {why}") from error
        self._server.add_generic_rpc_handlers((self._servicer.handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        await self.set_healthy(False)
        await self._server.start()
        return port

    def _bind_port(self, where: str) -> int:
        if self._trust.tls is None:
            return int(self._server.add_insecure_port(where))
        return int(self._server.add_secure_port(where, self._trust.tls.server_credentials()))

    async def serve(self, service: InstanceService) -> None:
        """Answer calls with `service` from now on."""
        self._servicer.take(service)
        await self.set_healthy(True)

    @property
    def num_waiting(self) -> int:
        """Calls that are waiting for the service."""
        return self._servicer.num_waiting

    async def set_healthy(self, healthy: bool) -> None:
        """Set the status of the standard gRPC health service, for the whole server."""
        status = health_pb2.HealthCheckResponse.SERVING if healthy else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set("", status)

    async def stop(self, grace_s: float) -> None:
        """End all sessions and release the port."""
        if self._server is not None:
            await self._server.stop(grace_s)


class _Servicer:
    """Moves messages between streams and an InstanceService; without one, it answers that it is loading.

    Requests arrive as bytes and are parsed after authentication: gRPC would log a traceback for each bad one.
    """

    def __init__(self, check: ProofCheck, first_command_s: float, loading_wait_s: float) -> None:
        self.num_waiting = 0
        self._service: InstanceService | None = None
        self._is_loaded = asyncio.Event()
        self._check, self._first_command_s, self._loading_wait_s = check, first_command_s, loading_wait_s

    def take(self, service: InstanceService) -> None:
        """Answer calls with `service`, including those already waiting for one."""
        self._service = service
        self._is_loaded.set()

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return the handlers of the three methods."""
        name = pb.DESCRIPTOR.services_by_name["Instance"].full_name
        return grpc.method_handlers_generic_handler(name, {
            "Challenge": grpc.unary_unary_rpc_method_handler(
                self.challenge, response_serializer=pb.ChallengeReply.SerializeToString
            ),
            "Describe": grpc.unary_unary_rpc_method_handler(
                self.describe, response_serializer=pb.InstanceDescription.SerializeToString
            ),
            "Session": grpc.stream_stream_rpc_method_handler(
                self.session, response_serializer=pb.EventMessage.SerializeToString
            ),
        })  # fmt: skip

    async def challenge(self, request: bytes, context: Any) -> pb.ChallengeReply:
        """Prove that this server holds the cluster secret, and issue a nonce."""
        try:
            parsed = _parse(pb.ChallengeRequest, request)
        except InvalidRequest as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return await self._check.challenge(parsed, context)

    async def describe(self, request: bytes, context: Any) -> pb.InstanceDescription:
        """Return the instance's description; the content of the request is ignored."""
        await self._check.admit(context, "Describe")
        return description_to_pb((await self._wait_loaded(context)).describe())

    async def session(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        """Serve one session: the first command opens it, a task reads the others, and its events are the replies."""
        await self._check.admit(context, "Session")
        session = await self._open(requests, context)
        reader = asyncio.create_task(_feed_session(session, requests))
        try:
            async for events in session.events():
                for message in pack([event_to_pb(event) for event in events]):
                    yield message
        finally:
            reader.cancel()
            session.lost()

    async def _wait_loaded(self, context: Any) -> InstanceService:
        if self._service is None:
            self.num_waiting += 1
            try:
                async with asyncio.timeout(self._loading_wait_s):
                    await self._is_loaded.wait()
            except TimeoutError:
                await context.abort(grpc.StatusCode.UNAVAILABLE, LOADING)
            finally:
                self.num_waiting -= 1
        assert self._service is not None
        return self._service

    async def _open(self, requests: AsyncIterator[bytes], context: Any) -> ServedSession:
        try:
            async with asyncio.timeout(self._first_command_s):
                message = await anext(aiter(requests))
            hello = _command(message)
            if not isinstance(hello, OpenSession):
                raise InvalidRequest(f"a session begins with OpenSession, not {type(hello).__name__}")
            return (await self._wait_loaded(context)).open(hello)
        except TimeoutError:
            reason = f"no command within {self._first_command_s:g} s of the session's start"
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, reason)
        except StopAsyncIteration:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a session without a command")
        except PdserveError as error:
            await context.abort(grpc.StatusCode[appearance(error).grpc_status], str(error))
        raise AssertionError("abort raises")


async def _feed_session(session: ServedSession, requests: AsyncIterator[bytes]) -> None:
    files = ImageFiles()
    try:
        async for message in requests:
            _take(session, message, files)
    finally:
        session.lost()


def _take(session: ServedSession, message: bytes, files: ImageFiles) -> None:
    """Pass on the commands of a message; an unreadable command is refused if its prompt id can be read."""
    try:
        parsed = _parse(pb.CommandMessage, message)
    except InvalidRequest as error:
        _log.warning("command_refused", error=error)
        return
    for one in (parsed, *parsed.more):
        if one.WhichOneof("command") == "image_piece":
            files.take(one.image_piece)
        else:
            _take_one(session, one, files)
            files.clear()


def _take_one(session: ServedSession, parsed: pb.CommandMessage, files: ImageFiles) -> None:
    prompt_id, request_id = _ids(parsed)
    try:
        command = files.attach(command_from_pb(parsed), [image.data_bytes for image in _images(parsed)])
    except InvalidRequest as error:
        _log.warning("command_refused", prompt_id=prompt_id, request_id=request_id, error=error)
        if prompt_id:
            session.refuse(prompt_id, error)
    else:
        session.handle(command)


def _images(message: pb.CommandMessage) -> Sequence[pb.PromptImage]:
    match message.WhichOneof("command"):
        case "prefill" | "generate" as kind:
            images: Sequence[pb.PromptImage] = getattr(message, kind).prompt.images
            return images
    return ()


def _ids(message: pb.CommandMessage) -> tuple[str, str]:
    """Return a command's prompt id and request id, empty where it has no prompt."""
    match message.WhichOneof("command"):
        case "reserve" | "prefill" | "generate" as kind:
            prompt = getattr(message, kind).prompt
            return str(prompt.prompt_id), str(prompt.request_id)
    return "", ""


def _command(data: bytes) -> Command:
    return command_from_pb(_parse(pb.CommandMessage, data))


def _parse(kind: type[_Message], data: bytes) -> _Message:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise InvalidRequest(f"{len(data)} bytes are not a {kind.__name__}") from error
