"""One contract for both connections to an instance: gRPC and in-process."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

import pytest

from rpc.channel import MAX_MESSAGE_BYTES
from rpc.grpc_connection import GrpcConnection
from rpc.grpc_server import GrpcServer
from simulation.instance import SimulatedInstance
from tests.rpc.reach import Reach, in_process, over_grpc
from wire.connection import Connection, Session
from wire.description import InstanceDescription, ModelIdentity
from wire.errors import ConfigError, DeadlineExceeded, InstanceLost, Loading
from wire.kv_layout import KvTensor
from wire.messages import (
    Cancel,
    Generate,
    Heartbeat,
    OpenSession,
    Prefill,
    Refused,
    Reserve,
    RoleHeld,
    SessionOpen,
    Step,
)
from wire.prompt_images import MAX_IMAGE_BYTES
from wire.types import (
    PROTOCOL_VERSION,
    FinishReason,
    Pooling,
    PromptImage,
    PromptState,
    Role,
    SamplingParams,
    Ticket,
    TokenOutput,
)

DEADLINE_S = 300.0
DESCRIPTION = InstanceDescription(
    "combined-1", 9, "127.0.0.1", ("0",), "127.0.0.1", 1, 1, Role.COMBINED, "t", PROTOCOL_VERSION,
    ModelIdentity("m", "w", "t"), 512, 1000, "float32", 16, 64, (KvTensor(0, "k", 1, 4, "float32"),), 512, 8, (),
)  # fmt: skip
HELLO = OpenSession("s", 1, 10.0)
TICKET = Ticket("0" * 32, 1, "decode-0", 1, 0, 10.0, ())
T = TypeVar("T")


def each(reach: Reach, test: Callable[[SimulatedInstance, Connection], Awaitable[T]]) -> T:
    async def run() -> T:
        instance = SimulatedInstance(DESCRIPTION, {})
        async with asyncio.timeout(DEADLINE_S), reach(instance) as connection:
            return await test(instance, connection)

    return asyncio.run(run())


async def received(instance: SimulatedInstance, session: Session) -> list[str]:
    """Return the cancelled prompts once all earlier commands have arrived, and close the session."""
    await session.send(Generate(PromptState("last", "r", (1,), SamplingParams(max_tokens=1))))
    async for event in session.events():
        if isinstance(event, Step):
            break
    await session.close()
    return [command.prompt_id for command in instance.commands if isinstance(command, Cancel)]


@pytest.fixture(params=[over_grpc, in_process])
def reach(request: pytest.FixtureRequest) -> Reach:
    chosen: Reach = request.param
    return chosen


def test_describe_returns_the_instances_description(reach: Reach) -> None:
    async def test(_: SimulatedInstance, connection: Connection) -> InstanceDescription:
        return await connection.describe(DEADLINE_S)

    assert each(reach, test) == DESCRIPTION


def test_a_session_begins_with_session_open(reach: Reach) -> None:
    async def test(_: SimulatedInstance, connection: Connection) -> object:
        session = await connection.open(HELLO, DEADLINE_S)
        first = await anext(session.events())
        await session.close()
        return first

    first = each(reach, test)

    assert isinstance(first, SessionOpen)
    assert first.instance_id == "combined-1"


def test_a_generate_returns_ordered_tokens_and_one_finish(reach: Reach) -> None:
    async def test(_: SimulatedInstance, connection: Connection) -> object:
        session = await connection.open(HELLO, DEADLINE_S)
        await session.send(Generate(PromptState("r/0", "r", (1, 2, 3), SamplingParams(max_tokens=4))))
        tokens: list[TokenOutput] = []
        async for event in session.events():
            if isinstance(event, Step):
                tokens.extend(event.tokens)
                if tokens and tokens[-1].finish is not None:
                    break
        await session.close()
        return [(token.index, token.finish) for token in tokens]

    assert each(reach, test) == [(0, None), (1, None), (2, None), (3, FinishReason.LENGTH)]


def test_commands_arrive_in_the_order_they_were_sent(reach: Reach) -> None:
    async def test(instance: SimulatedInstance, connection: Connection) -> object:
        session = await connection.open(HELLO, DEADLINE_S)
        for number in range(50):
            await session.send(Cancel(f"r/{number}"))
        return await received(instance, session)

    assert each(reach, test) == [f"r/{number}" for number in range(50)]


def test_commands_of_all_sizes_sent_together_arrive_in_order(reach: Reach) -> None:
    async def test(instance: SimulatedInstance, connection: Connection) -> object:
        session = await connection.open(HELLO, DEADLINE_S)
        await session.send(*(Cancel(f"r/{number}", reason="x" * (number % 3 * 90_000)) for number in range(50)))
        return await received(instance, session)

    assert each(reach, test) == [f"r/{number}" for number in range(50)]


def test_a_refused_prompt_in_a_batch_blocks_no_other(reach: Reach) -> None:
    async def test(_: SimulatedInstance, connection: Connection) -> object:
        session = await connection.open(HELLO, DEADLINE_S)
        good, bad = SamplingParams(max_tokens=1), SamplingParams(max_tokens=1, top_p=-1.0)
        params = {"a": good, "b": bad, "c": good}
        await session.send(*(Generate(PromptState(name, "r", (1,), params[name])) for name in params))
        endings: dict[str, str] = {}
        async for event in session.events():
            if isinstance(event, Refused):
                endings[event.prompt_id] = event.error
            elif isinstance(event, Step):
                endings |= {token.prompt_id: "ended" for token in event.tokens if token.finish is not None}
            if len(endings) == len(params):
                break
        await session.close()
        return endings

    assert each(reach, test) == {"a": "ended", "b": "InvalidRequest", "c": "ended"}


def test_closing_a_session_ends_its_work_on_the_instance(reach: Reach) -> None:
    async def test(instance: SimulatedInstance, connection: Connection) -> object:
        session = await connection.open(HELLO, DEADLINE_S)
        await session.send(Generate(PromptState("r/0", "r", (1, 2, 3), SamplingParams(max_tokens=400))))
        async for event in session.events():
            if isinstance(event, Step):
                break
        instance.get_stuck()  # the prompt does not end by itself
        assert instance.blocks_used
        await session.close()
        async with asyncio.timeout(DEADLINE_S):
            while instance.blocks_used:  # noqa: ASYNC110 - the other side of a socket has no event here
                await asyncio.sleep(0.01)
        return instance.blocks_used

    assert each(reach, test) == 0


def test_a_closed_session_refuses_commands_and_ends_its_events(reach: Reach) -> None:
    async def test(_: SimulatedInstance, connection: Connection) -> object:
        session = await connection.open(HELLO, DEADLINE_S)
        events = session.events()
        await anext(events)
        await session.close()
        left = [event async for event in events if not isinstance(event, Heartbeat | RoleHeld)]
        with pytest.raises(InstanceLost):
            await session.send(Cancel("r/0"))
        return left

    assert each(reach, test) == []


def test_tasks_may_send_at_the_same_time(reach: Reach) -> None:
    async def test(instance: SimulatedInstance, connection: Connection) -> list[str]:
        session = await connection.open(HELLO, DEADLINE_S)
        await asyncio.gather(*(session.send(Cancel(f"r/{number}")) for number in range(50)))
        return await received(instance, session)

    assert sorted(each(reach, test)) == sorted(f"r/{number}" for number in range(50))


class TestGrpcOnly:
    """What only the connection over a socket does."""

    def test_nothing_listening_is_a_lost_instance_with_a_reason(self) -> None:
        async def run(address: str) -> str:
            connection = GrpcConnection(address)
            try:
                with pytest.raises(InstanceLost) as caught:
                    await connection.describe(DEADLINE_S)
                return str(caught.value)
            finally:
                await connection.close()

        with socket.socket() as bound:  # and it does not listen
            bound.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{bound.getsockname()[1]}"
            assert asyncio.run(run(address)) == f"{address}: nothing is listening there"

    def test_a_silent_listener_is_reported_with_a_reason(self) -> None:
        async def run(address: str) -> str:
            connection = GrpcConnection(address)
            try:
                with pytest.raises(DeadlineExceeded) as caught:
                    await connection.describe(0.2)
                return str(caught.value)
            finally:
                await connection.close()

        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            assert asyncio.run(run(address)) == f"{address}: it does not answer in time"

    def test_a_loading_instance_reports_it(self) -> None:
        async def run() -> str:
            server = GrpcServer("127.0.0.1", 0)
            connection = GrpcConnection(f"127.0.0.1:{await server.start()}")
            try:
                with pytest.raises(Loading) as caught:
                    await connection.describe(DEADLINE_S)
                return str(caught.value)
            finally:
                await connection.close()
                await server.stop(0)

        assert asyncio.run(run()).endswith(": loading its model")

    def test_a_describe_while_loading_is_answered_once_loaded(self) -> None:
        async def run() -> InstanceDescription:
            server = GrpcServer("127.0.0.1", 0, loading_wait_s=DEADLINE_S)
            connection = GrpcConnection(f"127.0.0.1:{await server.start()}")
            try:
                async with asyncio.timeout(DEADLINE_S):
                    requested = asyncio.create_task(connection.describe(DEADLINE_S))
                    while not server.num_waiting:  # noqa: ASYNC110 - no event reports it
                        await asyncio.sleep(0)
                    await server.serve(SimulatedInstance(DESCRIPTION, {}))
                    return await requested
            finally:
                await connection.close()
                await server.stop(0)

        assert asyncio.run(run()) == DESCRIPTION

    def test_a_busy_port_is_a_config_error_naming_it(self) -> None:
        async def run(port: int) -> str:
            with pytest.raises(ConfigError) as caught:
                await GrpcServer("127.0.0.1", port).start()
            return str(caught.value)

        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = int(taken.getsockname()[1])

            assert str(port) in asyncio.run(run(port))

    def test_a_stopped_server_ends_the_sessions_events(self) -> None:
        async def run() -> None:
            server = GrpcServer("127.0.0.1", 0)
            port = await server.start()
            await server.serve(SimulatedInstance(DESCRIPTION, {}))
            connection = GrpcConnection(f"127.0.0.1:{port}")
            session = await connection.open(HELLO, DEADLINE_S)
            events = session.events()
            await anext(events)
            await server.stop(0)
            with pytest.raises(InstanceLost):
                async for _ in events:
                    pass
            await connection.close()

        asyncio.run(run())


@pytest.mark.parametrize("kind", [Reserve, Generate, Prefill])
def test_an_invalid_prompt_is_refused_before_the_instance(
    reach: Reach, kind: type[Reserve] | type[Generate] | type[Prefill]
) -> None:
    bad = PromptState("bad", "r", (1,), SamplingParams(max_tokens=1, repetition_penalty=-1.0))
    command = Prefill(bad, TICKET) if kind is Prefill else kind(bad)  # type: ignore[call-arg]

    async def send(instance: SimulatedInstance, connection: Connection) -> tuple[Refused, bool]:
        session = await connection.open(HELLO, DEADLINE_S)
        await session.send(command)
        events = session.events()
        refused = await anext(event async for event in events if isinstance(event, Refused))
        await session.close()
        return refused, command in instance.commands

    refused, reached = each(reach, send)

    assert (refused.prompt_id, refused.error, reached) == ("bad", "InvalidRequest", False)
    assert "repetition_penalty is -1.0, but must be" in refused.message


@pytest.mark.parametrize(
    "state",
    [
        PromptState("bad", "r", (), SamplingParams(max_tokens=1)),
        PromptState("bad", "r", (1,), SamplingParams(max_tokens=3, n=2), outputs=((4,),)),
        PromptState("bad", "r", (1,), SamplingParams(max_tokens=1), cache_salt="s" * 129),
        PromptState("bad", "r", (1,), SamplingParams(max_tokens=1), pooling=Pooling("draw")),
    ],
)
def test_an_invalid_prompt_is_refused_by_both_connections(reach: Reach, state: PromptState) -> None:
    async def send(_: SimulatedInstance, connection: Connection) -> Refused:
        session = await connection.open(HELLO, DEADLINE_S)
        await session.send(Generate(state))
        refused = await anext(event async for event in session.events() if isinstance(event, Refused))
        await session.close()
        return refused

    refused = each(reach, send)

    assert (refused.prompt_id, refused.error) == ("bad", "InvalidRequest")


def test_images_of_the_largest_size_arrive_larger_ones_are_refused() -> None:
    file = bytes(range(256)) * (MAX_IMAGE_BYTES // 256)

    async def send(instance: SimulatedInstance, connection: Connection) -> tuple[Refused, bytes]:
        session = await connection.open(HELLO, DEADLINE_S)
        image = PromptImage(0, 1, b"a" * 32, (1, 1, 1), file)
        params = SamplingParams(max_tokens=1)
        await session.send(
            Generate(PromptState("huge", "r", (1,), params, images=(replace(image, data=bytes(MAX_IMAGE_BYTES + 1)),)))
        )
        await session.send(Generate(PromptState("large", "r", (1,), params, images=(image,))))
        refused, served = None, False
        async for event in session.events():
            refused = event if isinstance(event, Refused) else refused
            served |= isinstance(event, Step) and bool(event.tokens)
            if refused is not None and served:
                break
        await session.close()
        assert refused is not None
        command = next(one for one in instance.commands if isinstance(one, Generate))
        return refused, command.prompt.images[0].data

    refused, arrived = each(over_grpc, send)

    assert (refused.prompt_id, refused.error, arrived == file) == ("huge", "InvalidRequest", True)
    assert str(MAX_IMAGE_BYTES) in refused.message


def test_a_prompt_too_large_for_a_message_is_refused() -> None:
    async def send(instance: SimulatedInstance, connection: Connection) -> tuple[Refused, list[str]]:
        session = await connection.open(HELLO, DEADLINE_S)
        huge = PromptState("huge", "r", (2**28,) * 3_500_000, SamplingParams(max_tokens=1))
        await session.send(Generate(huge))
        await session.send(Generate(PromptState("small", "r", (1,), SamplingParams(max_tokens=1))))
        refused, served = None, []
        async for event in session.events():
            if isinstance(event, Refused):
                refused = event
            elif isinstance(event, Step):
                served = [token.prompt_id for token in event.tokens]
            if refused is not None and served:
                break
        await session.close()
        assert refused is not None
        return refused, served

    refused, served = each(over_grpc, send)

    assert (refused.prompt_id, refused.error, served) == ("huge", "InvalidRequest", ["small"])
    assert str(MAX_MESSAGE_BYTES) in refused.message
