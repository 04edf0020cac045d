"""The control plane over real gRPC streams and real time: the same requests, cancels and losses."""

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from rpc.grpc_connection import GrpcConnection
from rpc.grpc_server import GrpcServer
from scheduler.control import Control
from scheduler.limits import ControlLimits
from scheduler.membership.compatibility import ExpectedInstance
from simulation.instance import SimulatedInstance
from tests.scheduler.fake_cluster import collect, control_over, describe, expected, request
from tests.scheduler.virtual_time import until
from wire.errors import InstanceLost
from wire.types import Role

PROMPT = (5, 6, 7)
DEADLINE_S = 300.0


@dataclass(frozen=True, slots=True)
class GrpcCluster:
    """A prefill and a decode instance behind gRPC servers, and a control plane that connects to them."""

    servers: tuple[GrpcServer, ...]
    instances: tuple[SimulatedInstance, ...]
    control: Control


@asynccontextmanager
async def serving() -> AsyncIterator[GrpcCluster]:
    """Serve fake instances over gRPC and run the control plane until it is ready."""
    servers = (GrpcServer("127.0.0.1", 0), GrpcServer("127.0.0.1", 0))
    peers: dict[str, SimulatedInstance] = {}
    entries = []
    for index, (server, role) in enumerate(zip(servers, (Role.PREFILL, Role.DECODE), strict=True)):
        description = dataclasses.replace(describe(index, role), host="127.0.0.1", port=await server.start())
        await server.serve(SimulatedInstance(description, peers))
        address = f"127.0.0.1:{description.port}"
        entries.append(
            ExpectedInstance(index, f"{role}-0", role, address, description.server_ip, description.device_ids)
        )
    control = control_over(entries, GrpcConnection, ControlLimits())
    running = asyncio.create_task(control.run())
    try:
        await until(control.ready)
        yield GrpcCluster(servers, tuple(peers.values()), control)
    finally:
        await control.dispatch.close(0.0)
        running.cancel()
        await asyncio.wait({running}, timeout=10.0)
        for server in servers:
            await server.stop(0.0)


def test_a_request_is_served_and_a_cancelled_one_is_released() -> None:
    async def run() -> None:
        async with serving() as cluster:
            dispatch = cluster.control.dispatch
            answer = await collect(dispatch, request(PROMPT, n=2))
            assert answer.tokens == {(0, s): expected(PROMPT, 4, s) for s in range(2)}
            assert answer.done[0].times.kv_bytes > 0

            reader = asyncio.create_task(collect(dispatch, request(PROMPT, max_tokens=900)))
            await until(lambda: any(p.stage == "decoding" for p in cluster.instances[1].prompts.values()))
            reader.cancel()
            await until(lambda: [instance.blocks_used for instance in cluster.instances] == [0, 0])
            assert dispatch.ledger.cancelled == 1

    asyncio.run(run())


@pytest.mark.parametrize("wrap", [2**31, 2**32, 2**53, 2**63, 2**64])
def test_requests_pass_every_number_at_which_a_counter_could_wrap(wrap: int) -> None:
    async def run() -> None:
        async with serving() as cluster:
            control = cluster.control
            control.dispatch._ids = itertools.count(wrap - 100)
            control.dispatch.admission._queue._numbers = itertools.count(wrap - 100)
            for instance in control.registry.living():
                instance.in_flight.version = wrap - 100
            prompts = [(5, 6, number) for number in range(300)]
            answers = await asyncio.gather(*(collect(control.dispatch, request(prompt)) for prompt in prompts))

            assert [one.tokens for one in answers] == [{(0, 0): expected(prompt, 4)} for prompt in prompts]
            await until(lambda: [one.blocks_used for one in cluster.instances] == [0, 0])
            assert next(control.dispatch._ids) >= wrap + 200
            assert control.dispatch.ledger.retried_prompts == 0

    asyncio.run(run())


def test_a_lost_server_fails_its_requests_with_a_reason() -> None:
    async def run() -> None:
        async with serving() as cluster:
            reader = asyncio.create_task(collect(cluster.control.dispatch, request(PROMPT, max_tokens=900)))
            await until(lambda: any(p.stage == "decoding" for p in cluster.instances[1].prompts.values()))
            await cluster.servers[1].stop(0.0)

            with pytest.raises(InstanceLost, match="decode-0 was lost: its connection broke"):
                await asyncio.wait_for(reader, DEADLINE_S)
            assert not cluster.control.ready()

    asyncio.run(run())
