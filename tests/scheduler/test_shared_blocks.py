"""A prompt shares the prefix blocks of one that generates on decode, and so needs fewer free ones."""

import asyncio
import dataclasses
import itertools

from simulation.instance import SimulatedInstance
from simulation.session import SimulatedSession
from tests.scheduler.fake_cluster import FakeCluster, collect, request
from tests.scheduler.virtual_time import until, virtual
from wire.load import LoadSnapshot
from wire.messages import Reserve
from wire.types import PromptState, Ticket

LONG = tuple(range(7 * 16))
ALIKE = (*LONG[:100], *range(500, 512))  # 6 blocks and 1 link alike, 7 blocks in all


class Sharing(SimulatedInstance):
    """Gives a reservation the blocks of its prefix that a prompt generates with here."""

    _shared = 0

    def load(self) -> LoadSnapshot:
        return dataclasses.replace(super().load(), prefix_tokens_sought=1)

    def _reserve(self, session: SimulatedSession, state: PromptState) -> None:
        running = (prompt.state for prompt in self.prompts.values() if prompt.stage == "decoding")
        alike = (_num_alike(state, other) for other in running if other is not None)
        self._shared = max(alike, default=0) // self.description.block_size
        super()._reserve(session, state)
        self._shared = 0

    def _blocks_for(self, num_tokens: int) -> int:
        return super()._blocks_for(num_tokens) - self._shared

    def _ticket(self, num_tokens: int) -> Ticket:
        first_token = self._shared * self.description.block_size
        return dataclasses.replace(super()._ticket(num_tokens), first_token=first_token)


def _num_alike(one: PromptState, other: PromptState) -> int:
    if one.cache_salt != other.cache_salt:
        return 0
    pairs = zip(one.token_ids, other.token_ids, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def sharing_cluster() -> FakeCluster:
    """One pair; decode has blocks for one and a half of the prompts."""
    cluster = FakeCluster("PD", prefill_chunk_size=512)
    cluster.kind = Sharing
    cluster.descriptions[1] = dataclasses.replace(cluster.descriptions[1], num_blocks=11)
    return cluster


@virtual
async def test_a_prompt_sharing_a_prefix_starts_beside_the_running_one() -> None:
    cluster = sharing_cluster()
    async with cluster.serving():
        _, decode = cluster.instances
        decode.behaviour.step_s = 1.0
        first = asyncio.create_task(collect(cluster.control.dispatch, request(LONG, max_tokens=9)))
        await until(lambda: bool(decode.steps))
        second = asyncio.create_task(collect(cluster.control.dispatch, request(ALIKE, max_tokens=3)))
        await until(lambda: [prompt.stage for prompt in decode.prompts.values()] == ["decoding"] * 2)

        await second
        assert not first.done()
        await first
        assert sum(isinstance(command, Reserve) for command in decode.commands) == 2  # none was refused
        assert cluster.control.registry.loads()[1].blocks_free == 11


@virtual
async def test_another_tenants_equal_prompt_waits_for_its_own_blocks() -> None:
    cluster = sharing_cluster()
    async with cluster.serving():
        _, decode = cluster.instances
        decode.behaviour.step_s = 1.0
        first = asyncio.create_task(collect(cluster.control.dispatch, request(LONG, max_tokens=9)))
        await until(lambda: bool(decode.steps))
        other = dataclasses.replace(request(ALIKE, max_tokens=3), cache_salt="another")
        second = asyncio.create_task(collect(cluster.control.dispatch, other))
        await first

        assert not second.done()
        await second
        assert sum(isinstance(command, Reserve) for command in decode.commands) == 2
