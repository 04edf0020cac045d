"""An instance fails in the middle of an answer: another continues from the emitted tokens, and no client notices."""

import asyncio
import dataclasses

import pytest

from scheduler.request import GenerationRequest
from simulation.instance import SimulatedInstance
from tests.scheduler.fake_cluster import Answer, FakeCluster, Running, collect, expected, request
from tests.scheduler.test_retries import PROMPT, assert_whole, linked
from tests.scheduler.virtual_time import until, virtual
from wire.errors import DeadlineExceeded, InstanceLost
from wire.load import LoadSnapshot
from wire.messages import Prefill


async def killed_after(cluster: FakeCluster, requested: GenerationRequest, *counts: int) -> Answer:
    """Run a request; kill its generating instance whenever so many tokens of its first sequence have arrived."""
    running = Running(cluster.control.dispatch, requested)
    async for token in running.read():
        if token.sequence == 0 and token.index + 1 in counts:
            decoding = [any(p.stage == "decoding" for p in one.prompts.values()) for one in cluster.instances]
            cluster.kill(decoding.index(True))
    return running


@pytest.mark.parametrize("count", [2, 3, 9])
@virtual
async def test_a_killed_decode_is_replaced_and_the_stream_resumes(count: int) -> None:
    async with linked("PDD") as (cluster, (prefill, _, other)):
        answer = await killed_after(cluster, request(PROMPT, max_tokens=10), count)

        await until(lambda: set(cluster.blocks_used) == {0})
        assert_whole(cluster, answer, 10, retried=1)
        assert answer.done[0].decode_instance == other.description.instance_id
        first, second = (c.prompt for c in prefill.commands if isinstance(c, Prefill))
        assert first.outputs == ()
        assert second.outputs == (tuple(expected(PROMPT, count)),)


@virtual
async def test_a_combined_instance_killed_in_the_middle_is_replaced_too() -> None:
    async with linked("CC") as (cluster, _):
        answer = await killed_after(cluster, request(PROMPT, max_tokens=10), 4)

        assert_whole(cluster, answer, 10, retried=1)
        assert answer.done[0].path == "local"


@virtual
async def test_each_sequence_of_a_prompt_continues_from_its_own_tokens() -> None:
    stop_id = expected(PROMPT, 3, sequence=1)[2]
    async with linked("PDD") as (cluster, _):
        answer = await killed_after(cluster, request(PROMPT, n=3, max_tokens=8, stop_token_ids=(stop_id,)), 5)

        assert answer.tokens == {
            (0, 0): expected(PROMPT, 8, 0),
            (0, 1): expected(PROMPT, 3, 1),
            (0, 2): expected(PROMPT, 8, 2),
        }
        await until(lambda: set(cluster.blocks_used) == {0})


@virtual
async def test_a_prompt_that_fails_in_the_middle_twice_gets_a_reason() -> None:
    async with linked("PDDD") as (cluster, _):
        with pytest.raises(InstanceLost, match=r"decode-\d was lost"):
            await killed_after(cluster, request(PROMPT, max_tokens=30), 5, 10)

        assert cluster.control.dispatch.ledger.retried_prompts == 1
        await until(lambda: set(cluster.blocks_used) == {0})


class Computing(SimulatedInstance):
    """Counts a prompt that it computes as running, as a real engine does."""

    def load(self) -> LoadSnapshot:
        return dataclasses.replace(super().load(), waiting=0)


@pytest.mark.parametrize("roles", ["PDD", "CC"])
@virtual
async def test_a_recomputed_prompt_gets_as_long_as_a_first_token(roles: str) -> None:
    long_prompt = tuple(range(480))  # fifteen chunks
    cluster = FakeCluster(roles)
    cluster.kind = Computing
    async with cluster.serving():
        for instance in cluster.instances:
            instance.behaviour.step_s = 1.0

        answer = await killed_after(cluster, request(long_prompt, max_tokens=10), 4)

        assert answer.tokens == {(0, 0): expected(long_prompt, 10)}
        assert cluster.control.dispatch.ledger.retried_prompts == 1


@virtual
async def test_a_prompt_recomputed_for_longer_than_that_fails() -> None:
    cluster = FakeCluster("PDD")
    cluster.kind = Computing
    async with cluster.serving():
        running = Running(cluster.control.dispatch, request(PROMPT, max_tokens=10, limits_s=(12.0, 5.0)))
        async for _token in running.read():
            cluster.instances[0].behaviour.step_s = 60.0
            break
        began = asyncio.get_running_loop().time()
        cluster.kill(1)

        with pytest.raises(DeadlineExceeded, match="no progress for 5 s, in prefill on prefill-0"):
            await running.task

        assert 12.0 <= asyncio.get_running_loop().time() - began < 18.0


@virtual
async def test_a_missing_first_token_ends_the_request_at_its_limit() -> None:
    cluster = FakeCluster("PD")
    cluster.kind = Computing
    async with cluster.serving():
        cluster.instances[0].behaviour.step_s = 600.0
        began = asyncio.get_running_loop().time()

        with pytest.raises(DeadlineExceeded, match="no first token within 12 s, in prefill on prefill-0"):
            await collect(cluster.control.dispatch, request(PROMPT, limits_s=(12.0, 5.0)))

        assert asyncio.get_running_loop().time() - began == pytest.approx(12.0, abs=0.1)
