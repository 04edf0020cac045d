"""Requests for vectors: one instance answers each prompt, and every outcome leaves nothing behind."""

import asyncio
from dataclasses import replace

import pytest

from scheduler.model.kind import ModelKind
from scheduler.request import GenerationRequest
from scheduler.vectors import collect_vectors, cosine
from simulation.prompt import simulated_vector
from tests.scheduler.fake_cluster import FakeCluster, collect, request
from tests.scheduler.virtual_time import until, virtual
from wire.errors import DeadlineExceeded, Unavailable
from wire.messages import Generate, Reserve
from wire.types import Pooling, SamplingParams

PROMPTS = ((1, 2, 3), (4, 5), (6,) * 40)


def pooling_request(*prompts: tuple[int, ...]) -> GenerationRequest:
    return GenerationRequest(
        request_id="r", prompts=prompts or PROMPTS, params=SamplingParams(max_tokens=1), first_token_timeout_s=5.0,
        stall_timeout_s=5.0, poolings=(Pooling(),) * len(prompts or PROMPTS),
    )  # fmt: skip


@virtual
@pytest.mark.parametrize("roles", ["C", "PD", "PPD"])
async def test_vectors_are_computed_by_prefill_instances(roles: str) -> None:
    async with FakeCluster(roles).serving() as cluster:
        assert await collect_vectors(cluster.control.dispatch, pooling_request()) == [
            simulated_vector(one) for one in PROMPTS
        ]

        decoding = [one for one, role in zip(cluster.instances, roles, strict=True) if role == "D"]
        assert not any(isinstance(command, Generate | Reserve) for one in decoding for command in one.commands)
        await until(lambda: not any(cluster.blocks_used))
        assert cluster.control.dispatch.ledger.completed == 1


@virtual
async def test_a_prompt_whose_instance_dies_is_answered_by_another() -> None:
    async with FakeCluster("PPD").serving() as cluster:
        first = cluster.instances[0]
        first.get_stuck()
        pending = asyncio.create_task(collect_vectors(cluster.control.dispatch, pooling_request((1, 2, 3))))
        await until(lambda: bool(first.prompts))
        cluster.kill(0)

        assert await pending == [simulated_vector((1, 2, 3))]
        assert cluster.control.dispatch.ledger.retried_prompts == 1


@virtual
async def test_only_vectors_are_served_without_a_decode_instance() -> None:
    async with FakeCluster("PD").serving() as cluster:
        cluster.kill(1)
        await until(lambda: not cluster.control.registry.has_path())

        assert await collect_vectors(cluster.control.dispatch, pooling_request((1, 2, 3))) == [
            simulated_vector((1, 2, 3))
        ]
        with pytest.raises(Unavailable, match="missing: decode-0"):
            await collect(cluster.control.dispatch, request((1, 2, 3)))

        cluster.kill(0)
        await until(lambda: not cluster.control.registry.living())
        with pytest.raises(Unavailable, match="missing: prefill-0, decode-0"):
            await collect_vectors(cluster.control.dispatch, pooling_request((1, 2, 3)))


@virtual
async def test_a_cancelled_request_leaves_nothing_on_the_instance() -> None:
    async with FakeCluster("C").serving() as cluster:
        cluster.instances[0].get_stuck()
        pending = asyncio.create_task(collect_vectors(cluster.control.dispatch, pooling_request((1, 2, 3))))
        await until(lambda: bool(cluster.instances[0].prompts))
        pending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pending

        await until(lambda: not cluster.instances[0].prompts)


@virtual
async def test_a_missing_answer_fails_at_the_limit_with_a_reason() -> None:
    async with FakeCluster("C").serving() as cluster:
        cluster.instances[0].behaviour.ignores_commands = True
        with pytest.raises(DeadlineExceeded, match="being pooled on combined-0"):
            await collect_vectors(cluster.control.dispatch, replace(pooling_request((1, 2)), first_token_timeout_s=1.0))


@virtual
@pytest.mark.parametrize("roles", ["C", "PD", "PPD"])
@pytest.mark.parametrize(
    ("kind", "pooling"),
    [
        (ModelKind.VECTORS, Pooling()),
        (ModelKind.SCORES, Pooling("classify", second_text=2)),
        (ModelKind.CLASSES, Pooling("classify")),
    ],
)
async def test_a_model_without_generation_is_probed_by_vectors(roles: str, kind: ModelKind, pooling: Pooling) -> None:
    async with FakeCluster(roles, probes=True, kind=kind).serving() as cluster:
        await until(cluster.control.ready, timeout_s=3.0)
        await until(lambda: not cluster.control.readiness.due(), timeout_s=3.0)

        for one, role in zip(cluster.instances, roles, strict=True):
            probes = [command.prompt for command in one.commands if isinstance(command, Generate | Reserve)]
            assert [(probe.probe, probe.pooling) for probe in probes] == [(True, pooling)] * (role != "D")


@virtual
async def test_vectors_count_as_crossings_and_replace_probes() -> None:
    async with FakeCluster("C", probes=True, kind=ModelKind.VECTORS).serving() as cluster:
        await until(cluster.control.ready)
        for _ in range(20):
            await collect_vectors(cluster.control.dispatch, pooling_request((1, 2, 3)))
            await asyncio.sleep(1.0)

        sent = [command.prompt for command in cluster.instances[0].commands if isinstance(command, Generate)]
        assert sum(prompt.probe for prompt in sent) == 1


def test_cosine_is_that_of_the_angle() -> None:
    assert cosine((1.0, 0.0), (0.0, 3.0)) == 0.0
    assert cosine((1.0, 1.0), (2.0, 2.0)) == pytest.approx(1.0)
    assert cosine((1.0, 0.0), (-2.0, 0.0)) == -1.0
    assert cosine((0.0, 0.0), (1.0, 0.0)) == 0.0
    with pytest.raises(ValueError, match="longer"):
        cosine((1.0,), (1.0, 2.0))
