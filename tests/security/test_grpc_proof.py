"""The cluster secret on gRPC, over real sockets: who is admitted, what both sides log, and what crosses the wire."""

import asyncio
import contextlib
import logging
import pickle
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.internal import api_implementation
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rpc.grpc_connection import GrpcConnection
from rpc.grpc_server import GrpcServer
from security.grpc_proof import Metadata, ProofCheck, prove
from security.nonces import NONCE_LIFE_S
from security.secret import Secret
from security.trust import Trust
from simulation.instance import SimulatedInstance
from telemetry.capped_logs import LINES, WINDOW_S
from wire import cluster_pb2 as pb
from wire import cluster_pb2_grpc as pb_grpc
from wire.connection import InstanceService
from wire.description import InstanceDescription, ModelIdentity
from wire.errors import DeadlineExceeded, Incompatible, InstanceLost, PdserveError
from wire.kv_layout import KvTensor
from wire.messages import OpenSession
from wire.types import PROTOCOL_VERSION, Role

DEADLINE_S = 300.0
DESCRIPTION = InstanceDescription(
    "combined-1", 9, "127.0.0.1", ("0",), "127.0.0.1", 1, 1, Role.COMBINED, "t", PROTOCOL_VERSION,
    ModelIdentity("m", "w", "t"), 512, 1000, "float32", 16, 64, (KvTensor(0, "k", 1, 4, "float32"),), 512, 8, (),
)  # fmt: skip
HELLO = OpenSession("s", 1, 10.0)
VALUE = b"the-cluster-secret-of-the-tests-" * 2
SECRET, OTHER = Secret(VALUE), Secret(b"another-" * 8)
HERE, THERE = Trust(SECRET, host="scheduler-host"), Trust(SECRET, host="instance-host")
NO_PEERS = Trust(None, frozenset({"192.0.2.1"}), loopback=False, host="instance-host")


def instance() -> InstanceService:
    return SimulatedInstance(DESCRIPTION, {})


@contextlib.asynccontextmanager
async def serving(trust: Trust, *, first_command_s: float = DEADLINE_S) -> AsyncIterator[str]:
    server = GrpcServer("127.0.0.1", 0, trust, first_command_s=first_command_s)
    port = await server.start()
    await server.serve(instance())
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def stub(address: str) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield pb_grpc.InstanceStub(channel)


@contextlib.asynccontextmanager
async def connect(address: str, trust: Trust) -> AsyncIterator[GrpcConnection]:
    connection = GrpcConnection(address, trust)
    try:
        yield connection
    finally:
        await connection.close()


async def close_writer(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def refusal(there: Trust, here: Trust) -> PdserveError:
    """Return the error of a describe by `here` at `there`."""

    async def run() -> PdserveError:
        async with serving(there) as address, connect(address, here) as connection:
            with pytest.raises(PdserveError) as caught:
                await connection.describe(DEADLINE_S)
            return caught.value

    return asyncio.run(run())


def rpc_error(there: Trust, call: Callable[[Any, str], Awaitable[object]]) -> grpc.aio.AioRpcError:
    """Return the error of a call made by hand."""

    async def run() -> grpc.aio.AioRpcError:
        async with serving(there) as address, stub(address) as one:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(one, address)
            return caught.value

    return asyncio.run(run())


def test_equal_secrets_describe_and_open_a_session() -> None:
    async def run() -> tuple[InstanceDescription, object]:
        async with serving(THERE) as address, connect(address, HERE) as connection:
            description = await connection.describe(DEADLINE_S)
            session = await connection.open(HELLO, DEADLINE_S)
            first = await anext(session.events())
            await session.close()
            return description, type(first).__name__

    assert asyncio.run(run()) == (DESCRIPTION, "SessionOpen")


def test_unequal_secrets_are_reported_with_fingerprint_and_host(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "pdserve.trust"):
        error = refusal(THERE, Trust(OTHER, host="scheduler-host"))

    assert isinstance(error, Incompatible)
    here, there = f"{OTHER.fingerprint} here (scheduler-host)", f"{SECRET.fingerprint} there (instance-host at 127.0"
    assert f"cluster secrets differ: {here}, {there}" in str(error)
    mine, theirs = f"{SECRET.fingerprint} here (instance-host)", f"{OTHER.fingerprint} there (scheduler-host at 127.0"
    assert f"cluster secrets differ: {mine}, {theirs}" in caplog.text


def test_a_secret_missing_at_the_caller_is_reported_on_both_sides(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "pdserve.trust"):
        error = refusal(THERE, Trust(host="scheduler-host"))

    assert isinstance(error, Incompatible)
    assert f"no cluster secret here (scheduler-host), but {SECRET.fingerprint} there (instance-host" in str(error)
    assert f"{SECRET.fingerprint} is set here (instance-host), but none is set there (scheduler-host" in caplog.text


def test_a_secret_missing_at_the_instance_is_reported_on_both_sides(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "pdserve.trust"):
        error = refusal(Trust(host="instance-host"), HERE)

    assert isinstance(error, Incompatible)
    assert f"{SECRET.fingerprint} is set here (scheduler-host), but none is set there (instance-host" in str(error)
    assert f"no cluster secret here (instance-host), but {SECRET.fingerprint} there (scheduler-host" in caplog.text


def test_without_secrets_an_unknown_peer_is_refused_with_its_address() -> None:
    error = refusal(NO_PEERS, Trust(host="scheduler-host"))

    assert isinstance(error, Incompatible)
    assert "127.0.0.1 is not in the global table of instance-host (192.0.2.1)" in str(error)


@pytest.mark.parametrize("method", ["Describe", "Session"])
@pytest.mark.parametrize("metadata", [(), (("pdserve-proof-bin", bytes(32)),)])
def test_a_call_without_proof_is_unauthenticated_with_a_message(method: str, metadata: Metadata) -> None:
    async def call(one: Any, _: str) -> None:
        if method == "Describe":
            await one.Describe(pb.DescribeRequest(), timeout=DEADLINE_S, metadata=metadata)
        else:
            await one.Session(timeout=DEADLINE_S, metadata=metadata).read()

    error = rpc_error(THERE, call)

    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    words = f"instance-host requires the cluster secret {SECRET.fingerprint}; {method} came without proof"
    assert error.details() == words


def test_a_proof_opens_one_call_of_its_method_and_no_other() -> None:
    async def replay(one: Any, address: str) -> None:
        metadata = await prove(one, "Describe", HERE, address, DEADLINE_S)
        await one.Describe(pb.DescribeRequest(), timeout=DEADLINE_S, metadata=metadata)
        await one.Describe(pb.DescribeRequest(), timeout=DEADLINE_S, metadata=metadata)

    async def elsewhere(one: Any, address: str) -> None:
        metadata = await prove(one, "Describe", HERE, address, DEADLINE_S)
        await one.Session(timeout=DEADLINE_S, metadata=metadata).read()

    replayed, moved = rpc_error(THERE, replay), rpc_error(THERE, elsewhere)

    assert replayed.code() is moved.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "its nonce was used before" in str(replayed.details())
    assert "its proof is wrong" in str(moved.details())


def test_a_forged_proof_does_not_use_up_the_nonce() -> None:
    async def run() -> InstanceDescription:
        async with serving(THERE) as address, stub(address) as one:
            good = await prove(one, "Describe", HERE, address, DEADLINE_S)
            bad = (*good[:2], (good[2][0], bytes(32)))
            with pytest.raises(grpc.aio.AioRpcError, match="its proof is wrong"):
                await one.Describe(pb.DescribeRequest(), timeout=DEADLINE_S, metadata=bad)
            await one.Describe(pb.DescribeRequest(), timeout=DEADLINE_S, metadata=good)
            return DESCRIPTION

    assert asyncio.run(run())


def test_a_server_that_only_knows_the_fingerprint_is_refused() -> None:
    class Impostor(pb_grpc.InstanceServicer):
        async def Challenge(self, request: pb.ChallengeRequest, context: Any) -> pb.ChallengeReply:
            return pb.ChallengeReply(nonce=bytes(40), proof=bytes(32), fingerprint=request.fingerprint, host="evil")

    async def run() -> str:
        server = grpc.aio.server()
        pb_grpc.add_InstanceServicer_to_server(Impostor(), server)  # type: ignore[no-untyped-call,unused-ignore]
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with connect(f"127.0.0.1:{port}", HERE) as connection:
                with pytest.raises(Incompatible) as caught:
                    await connection.describe(DEADLINE_S)
                return str(caught.value)
        finally:
            await server.stop(0)

    assert "but cannot prove that it holds it" in asyncio.run(run())


def test_the_secret_never_crosses_the_wire() -> None:
    seen = bytearray()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                seen.extend(data)
                writer.write(data)
                await writer.drain()
        await close_writer(writer)

    async def run() -> None:
        taps: set[asyncio.Task[object]] = set()
        async with serving(THERE) as address:

            async def tap(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                task = asyncio.current_task()
                assert task is not None
                taps.add(task)
                host, _, port = address.rpartition(":")
                up_reader, up_writer = await asyncio.open_connection(host, int(port))
                await asyncio.gather(pump(reader, up_writer), pump(up_reader, writer))

            listener = await asyncio.start_server(tap, "127.0.0.1", 0)
            async with connect(f"127.0.0.1:{listener.sockets[0].getsockname()[1]}", HERE) as connection:
                await connection.describe(DEADLINE_S)
                session = await connection.open(HELLO, DEADLINE_S)
                await session.close()
            listener.close()
        await asyncio.wait_for(asyncio.gather(*taps), DEADLINE_S)

    asyncio.run(run())

    assert SECRET.fingerprint.encode() in seen  # the tap saw the calls
    assert VALUE not in seen
    assert VALUE[:32] not in seen
    assert VALUE.hex().encode() not in seen


def test_the_health_service_stays_open() -> None:
    async def run() -> int:
        async with serving(THERE) as address, grpc.aio.insecure_channel(address) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            reply = await health.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
            return int(reply.status)

    assert asyncio.run(run()) == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("length", [0, 15, 65, 4096])
def test_a_nonce_of_a_wrong_length_is_refused_with_the_limits(length: int) -> None:
    async def call(one: Any, _: str) -> None:
        await one.Challenge(pb.ChallengeRequest(nonce=bytes(length)), timeout=DEADLINE_S)

    error = rpc_error(THERE, call)

    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == f"the nonce has {length} bytes, but must have 16 to 64"


def test_an_expired_nonce_is_refused_and_may_be_retried() -> None:
    now = 0.0

    class Context:
        def __init__(self, metadata: Metadata = ()) -> None:
            self._metadata = metadata

        def peer(self) -> str:
            return "ipv4:127.0.0.1:40000"

        def invocation_metadata(self) -> Metadata:
            return self._metadata

        async def abort(self, code: grpc.StatusCode, words: str) -> None:
            raise InstanceLost(f"{code.name} {words}")

    class Stub:
        async def Challenge(self, request: pb.ChallengeRequest, timeout: float) -> pb.ChallengeReply:
            return await check.challenge(request, Context())

    check = ProofCheck(THERE, lambda: now)

    async def run() -> str:
        nonlocal now
        stale = await prove(Stub(), "Describe", HERE, "a:1", DEADLINE_S)
        now += NONCE_LIFE_S + 1
        with pytest.raises(InstanceLost) as caught:
            await check.admit(Context(stale), "Describe")
        await check.admit(Context(await prove(Stub(), "Describe", HERE, "a:1", DEADLINE_S)), "Describe")
        return str(caught.value)

    assert "its nonce is 11.0 s old, but the limit is 10 s" in asyncio.run(run())
    assert check.refused == 1


def test_an_unknown_peer_that_keeps_calling_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with serving(THERE) as address, stub(address) as one:
            for number in range(200):
                await one.Challenge(pb.ChallengeRequest(nonce=bytes(16), host=f"h{number}"), timeout=DEADLINE_S)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await one.Describe(pb.DescribeRequest(), timeout=DEADLINE_S)

    with caplog.at_level(logging.WARNING, "pdserve.trust"):
        asyncio.run(run())

    assert 0 < sum(record.name == "pdserve.trust" for record in caplog.records) <= 64


def test_after_a_flood_the_number_of_omitted_lines_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0

    class Context:
        def peer(self) -> str:
            return "ipv4:127.0.0.1:40000"

    async def call(host: str) -> None:
        await check.challenge(pb.ChallengeRequest(nonce=bytes(16), host=host), Context())

    check = ProofCheck(THERE, lambda: now)
    with caplog.at_level(logging.WARNING, "pdserve.trust"):
        for number in range(100):
            asyncio.run(call(f"h{number}"))
        now += WINDOW_S
        asyncio.run(call("misconfigured"))

    messages = [record.getMessage() for record in caplog.records if record.name == "pdserve.trust"]
    assert f"of=other_secret lines={100 - LINES}" in messages[-2]
    assert "misconfigured at 127.0.0.1" in messages[-1]


def test_a_callers_host_and_fingerprint_cannot_forge_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with serving(THERE) as address, stub(address) as one:
            hostile = pb.ChallengeRequest(nonce=bytes(16), host="a\n2026 ERROR forged", fingerprint="\x1b[31m")
            await one.Challenge(hostile, timeout=DEADLINE_S)

    with caplog.at_level(logging.WARNING, "pdserve.trust"):
        asyncio.run(run())

    assert "\n" not in caplog.records[0].getMessage()
    assert "\x1b" not in caplog.text
    assert "unreadable there (a?2026?ERROR?forged" in caplog.text


class TestHostileBytes:
    """Inputs of published attacks on gRPC workers."""

    def test_a_header_bomb_is_refused_and_the_server_lives(self) -> None:
        async def run() -> tuple[grpc.StatusCode, InstanceDescription]:
            async with serving(THERE) as address, stub(address) as one:
                bomb = tuple((f"key-{number}", "x" * 1000) for number in range(100))
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await one.Describe(pb.DescribeRequest(), timeout=DEADLINE_S, metadata=bomb)
                async with connect(address, HERE) as connection:
                    return caught.value.code(), await connection.describe(DEADLINE_S)

        code, description = asyncio.run(run())

        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert description == DESCRIPTION

    def test_a_message_over_the_limit_is_refused(self) -> None:
        async def call(one: Any, _: str) -> None:
            await one.Challenge(pb.ChallengeRequest(nonce=bytes(17 * 2**20)), timeout=DEADLINE_S)

        assert rpc_error(THERE, call).code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    @pytest.mark.parametrize("blob", [pickle.dumps({"a": [1] * 99}), b"\xff" * 300, b"\x0b" * 10_000])
    def test_a_body_that_is_not_protobuf_is_refused(self, blob: bytes) -> None:
        async def run() -> grpc.StatusCode:
            async with serving(THERE) as address, grpc.aio.insecure_channel(address) as channel:
                raw: Any = channel.unary_unary("/pdserve.wire.Instance/Challenge")
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await raw(blob, timeout=DEADLINE_S)
                async with connect(address, HERE) as connection:
                    assert await connection.describe(DEADLINE_S) == DESCRIPTION
                return caught.value.code()

        assert asyncio.run(run()) in (grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT)

    def test_unknown_fields_are_skipped_and_bytes_are_not_unpickled(self) -> None:
        async def run() -> bytes:
            async with serving(THERE) as address, grpc.aio.insecure_channel(address) as channel:
                raw: Any = channel.unary_unary("/pdserve.wire.Instance/Challenge")
                blob = pickle.dumps(list(range(8)))[:64].ljust(32, b"\0")
                # Field 1 (nonce) is the blob, field 15 is unknown.
                data = b"\x0a" + bytes([len(blob)]) + blob + b"\x7a\x03abc"
                return bytes(await raw(data, timeout=DEADLINE_S))

        assert pb.ChallengeReply.FromString(asyncio.run(run())).fingerprint == SECRET.fingerprint

    def test_the_protobuf_parser_in_use_bounds_recursion(self) -> None:
        assert api_implementation.Type() == "upb"

    @pytest.mark.parametrize("blob", [pickle.dumps([1, 2, 3]), b"GET / HTTP/1.1\r\nHost: evil\r\n\r\n", bytes(4096)])
    def test_a_connection_that_is_not_http2_is_closed(self, blob: bytes) -> None:
        async def run() -> bytes:
            async with serving(THERE) as address:
                host, _, port = address.rpartition(":")
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(blob)
                got = bytearray()
                async with asyncio.timeout(DEADLINE_S):
                    with contextlib.suppress(ConnectionResetError):
                        while data := await reader.read(65536):
                            got.extend(data)
                await close_writer(writer)
                async with connect(address, HERE) as connection:
                    assert await connection.describe(DEADLINE_S) == DESCRIPTION
                return bytes(got)

        assert b"HTTP/1.1 200" not in asyncio.run(run())

    @pytest.mark.parametrize("name", ["Reflect", "ServerReflectionInfo", "Shutdown", ""])
    def test_the_service_has_three_methods(self, name: str) -> None:
        async def run() -> grpc.StatusCode:
            async with serving(THERE) as address, grpc.aio.insecure_channel(address) as channel:
                raw: Any = channel.unary_unary(f"/pdserve.wire.Instance/{name}")
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await raw(b"", timeout=DEADLINE_S)
                return caught.value.code()

        assert asyncio.run(run()) is grpc.StatusCode.UNIMPLEMENTED
        methods = [method.name for method in pb.DESCRIPTOR.services_by_name["Instance"].methods]
        assert methods == ["Challenge", "Describe", "Session"]


def test_a_session_without_a_first_command_ends_at_the_deadline() -> None:
    async def run() -> grpc.aio.AioRpcError:
        async with serving(THERE, first_command_s=0.2) as address, stub(address) as one:
            metadata = await prove(one, "Session", HERE, address, DEADLINE_S)
            call = one.Session(metadata=metadata)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async with asyncio.timeout(DEADLINE_S):
                    await call.read()
            return caught.value

    error = asyncio.run(run())

    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert error.details() == "no command within 0.2 s of the session's start"


def test_a_challenge_without_an_answer_ends_at_the_deadline() -> None:
    async def run(address: str) -> list[str]:
        messages = []
        async with connect(address, HERE) as connection:
            for ask in (connection.describe(0.3), connection.open(HELLO, 0.3)):
                with pytest.raises((DeadlineExceeded, InstanceLost)) as caught:
                    await ask
                messages.append(str(caught.value))
        return messages

    with socket.create_server(("127.0.0.1", 0)) as silent_server:
        address = f"127.0.0.1:{silent_server.getsockname()[1]}"

        assert all(address in words for words in asyncio.run(run(address)))
