"""Workers that get their requests at once: the same answers as in the other orders, or an early error."""

import asyncio
import contextlib
import dataclasses
from typing import Any

import pytest

from scheduler.limits import ControlLimits
from scheduler.request import GenerationRequest
from scheduler.workers.connection import WorkerConnection
from scheduler.workers.legs import LEASE_S
from scheduler.workers.transfers import MooncakeKv, PushedKv
from testing.engine.fake_model import expected_tokens
from testing.vllm_worker.faults import Action, Fault, Point
from testing.vllm_worker.settings import Connector, WorkerSettings
from testing.vllm_worker.worker import FakeVllmWorker, Received
from tests.scheduler.fake_cluster import Running, request
from tests.scheduler.virtual_time import until
from tests.scheduler.worker_cluster import LEG_FAULTS, SETTINGS, WorkerCluster, leg_id, with_fake
from wire.errors import HandoffFailed, Incompatible, InstanceLost
from wire.types import Role, SamplingParams

PROMPT = tuple(range(10, 60))
LENGTH = 24
CONNECTORS: tuple[Connector, ...] = ("nixl-push", "mooncake")
SLOW = ("nixl-push", pytest.param("mooncake", marks=pytest.mark.long))
"""CONNECTORS, where a test waits for steps of seconds and no line depends on them."""


def _of(connector: Connector, settings: WorkerSettings = SETTINGS, **changes: Any) -> WorkerSettings:
    return dataclasses.replace(settings, connector=connector, **changes)


def _greedy(**changes: Any) -> GenerationRequest:
    return request(PROMPT, temperature=0.0, max_tokens=LENGTH, **changes)


def _right() -> list[int]:
    return list(expected_tokens(SETTINGS.fake, PROMPT, _greedy().params, count=LENGTH, salts=[0]))


def _legs(cluster: WorkerCluster) -> tuple[Received, Received]:
    (prefill,), (decode,) = (worker.received for worker in cluster.workers)
    return prefill, decode


@pytest.mark.parametrize("connector", SLOW)
@pytest.mark.anyio
async def test_decode_is_asked_while_prefill_computes(connector: Connector) -> None:
    async with WorkerCluster("PD", _of(connector, with_fake(step_seconds=0.3))).serving() as cluster:
        running = asyncio.create_task(cluster.answer(request(PROMPT, temperature=0.0, max_tokens=2)))
        await until(lambda: cluster.workers[1].ranks[0].waiting == 1)
        assert cluster.workers[0].ranks[0].running == 1
        answer = await running
        assert answer.tokens == {(0, 0): _right()[:2]}
        assert answer.done[0].path == "both_at_once"
        assert (answer.done[0].times.prefill_s or 0.0) >= 0.3
        prefill, decode = _legs(cluster)
        assert leg_id(prefill) == leg_id(decode)
        assert (prefill.body["max_tokens"], prefill.body["min_tokens"]) == (1, 1)
        await until(lambda: not (cluster.kv_usage(Role.PREFILL) or cluster.kv_usage(Role.DECODE)))


@pytest.mark.anyio
async def test_push_gives_decode_the_engine_of_prefill() -> None:
    async with WorkerCluster("PD", _of("nixl-push")).serving() as cluster:
        await cluster.answer(_greedy())
        prefill, decode = _legs(cluster)
        wanted = decode.body["kv_transfer_params"]
        assert wanted["remote_engine_id"] == cluster.workers[0].ranks[0].engine_id
        assert wanted["remote_request_id"] == leg_id(prefill)
        assert {"remote_host", "remote_port", "tp_size", "pp_size", "remote_block_ids"} <= wanted.keys()


@pytest.mark.anyio
async def test_mooncake_gives_both_one_transfer_id() -> None:
    async with WorkerCluster("PD", _of("mooncake")).serving() as cluster:
        await cluster.answer(_greedy())
        prefill, decode = _legs(cluster)
        transfer_id = f"xfer-{leg_id(prefill)}"
        worker = cluster.workers[0]
        assert prefill.body["kv_transfer_params"] == {
            "do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id,
        }  # fmt: skip
        assert decode.body["kv_transfer_params"] == {
            "do_remote_decode": False, "do_remote_prefill": True, "transfer_id": transfer_id,
            "remote_bootstrap_addr": f"http://127.0.0.1:{worker.settings.bootstrap_port}",
            "remote_engine_id": worker.ranks[0].engine_id,
        }  # fmt: skip


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.anyio
async def test_each_sequence_has_a_transfer_of_its_own(connector: Connector) -> None:
    async with WorkerCluster("PD", _of(connector)).serving() as cluster:
        answer = await cluster.answer(request(PROMPT, PROMPT[:7], n=3, max_tokens=LENGTH, seed=5))
        assert len({tuple(ids) for ids in answer.tokens.values()}) == 6
        assert len({leg_id(one) for one in cluster.workers[1].received}) == 6


@pytest.mark.parametrize("action", ["error", "hang"])
@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.combinations(1)
@pytest.mark.anyio
async def test_a_second_sequence_whose_prefill_fails_is_done_again(
    connector: Connector, action: Action, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, limits, legs = request(PROMPT, n=2, max_tokens=LENGTH, seed=5), ControlLimits(probe_after_s=3600.0), []

    def take(leg: str) -> Fault | None:
        legs.append(leg)
        return Fault(action) if len(legs) == 2 else None

    settings = _of(connector, with_fake(step_seconds=0.01))
    async with WorkerCluster("PPDD", settings, limits=limits).serving() as cluster:
        right = (await cluster.answer(wanted)).tokens
        for worker in cluster.workers[:2]:
            monkeypatch.setattr(worker.faults, "take", take)
        monkeypatch.setattr("scheduler.workers.prefill_legs.LEASE_S", 1.0)
        answer = await asyncio.wait_for(cluster.answer(wanted), 7.0)
        assert (answer.tokens, answer.done[0].tries) == (right, 2)


@pytest.mark.parametrize(("leg", "point", "action"), LEG_FAULTS)
@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.combinations(1)
@pytest.mark.anyio
async def test_a_leg_that_fails_is_done_again(connector: Connector, leg: Any, point: Point, action: Action) -> None:
    async with WorkerCluster("PPDD", _of(connector, with_fake(step_seconds=0.002))).serving() as cluster:
        at = 0 if leg == "prefill" else 2
        cluster.workers[at].faults.add(Fault(action, point, leg, after_tokens=5 if point == "during" else 0))
        answers = [await cluster.answer(_greedy()) for _ in range(3)]
        assert [answer.tokens for answer in answers] == [{(0, 0): _right()}] * 3
        assert sum(answer.done[0].tries for answer in answers) <= 4
        await until(lambda: not any(rank.running + rank.waiting for one in cluster.workers for rank in one.ranks))


@pytest.mark.parametrize("connector", SLOW)
@pytest.mark.anyio
async def test_prefill_that_is_lost_before_decode_starts_is_noticed(connector: Connector) -> None:
    limits = ControlLimits(max_tries=1)
    async with WorkerCluster("PD", _of(connector, with_fake(step_seconds=0.5)), limits=limits).serving() as cluster:
        running = asyncio.create_task(cluster.answer(_greedy()))
        await until(lambda: cluster.workers[1].ranks[0].waiting == 1)
        await cluster.workers[0].stop()
        with pytest.raises(InstanceLost):
            await asyncio.wait_for(running, 3.0)
        await until(lambda: not cluster.workers[1].ranks[0].waiting)


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.anyio
async def test_decode_that_gets_no_kv_after_prefill_is_given_up(
    connector: Connector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler.workers.prefill_legs.LEASE_S", 0.3)
    async with WorkerCluster("PPD", _of(connector)).serving() as cluster:
        cluster.workers[2].faults.add(Fault("hang", "before", "decode"))
        answer = await asyncio.wait_for(cluster.answer(_greedy()), LEASE_S)
        assert (answer.tokens, answer.done[0].tries) == ({(0, 0): _right()}, 2)


@pytest.mark.parametrize("connector", SLOW)
@pytest.mark.anyio
async def test_a_prompt_waits_for_a_full_decode_worker(connector: Connector, monkeypatch: pytest.MonkeyPatch) -> None:
    """From vLLM 0.33 on a worker reports which requests it has queued: no failure of the request or of the pair."""
    monkeypatch.setattr("scheduler.workers.prefill_legs.LEASE_S", 0.6)
    monkeypatch.setattr("scheduler.workers.session._POLL_S", 0.1)
    settings = _of(connector, with_fake(step_seconds=0.02), max_num_seqs=1, version="0.33.0")
    async with WorkerCluster("PD", _of(connector, version="0.33.0"), settings).serving() as cluster:
        end = cluster.workers[1].ranks[0]
        first = asyncio.create_task(cluster.answer(request(PROMPT, temperature=0.0, max_tokens=100)))
        await until(lambda: end.running == 1)
        answers = await asyncio.gather(*(cluster.answer(_greedy()) for _ in range(3)))
        await first

        assert [(one.tokens, one.done[0].tries) for one in answers] == [({(0, 0): _right()}, 1)] * 3
        assert not cluster.gaps()


@pytest.mark.parametrize("connector", SLOW)
@pytest.mark.anyio
async def test_a_client_that_leaves_in_prefill_frees_both(connector: Connector) -> None:
    async with WorkerCluster("PD", _of(connector, with_fake(step_seconds=0.3))).serving() as cluster:
        wanted = dataclasses.replace(_greedy(), params=SamplingParams(max_tokens=400, temperature=0.0))
        running = Running(cluster.control.dispatch, wanted, is_last=lambda token: token.index == 3)
        await until(lambda: cluster.workers[1].ranks[0].waiting == 1)
        running.task.cancel()
        await asyncio.wait({running.task})
        await until(lambda: not (cluster.kv_usage(Role.PREFILL) or cluster.kv_usage(Role.DECODE)))
        assert cluster.workers[0].ranks[0].counts.requests["length"] > 0, "prefill went on, for decode's blocks"


@pytest.mark.anyio
async def test_prefills_that_clients_left_delay_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.workers.connection._CHUNK", len(PROMPT))
    async with WorkerCluster("PD", _of("mooncake", with_fake(step_seconds=0.4))).serving() as cluster:
        prefill = cluster.workers[0].ranks[0]
        left = [asyncio.create_task(cluster.answer(_greedy())) for _ in range(2)]
        await until(lambda: prefill.running == 2)
        for task in left:
            task.cancel()
        await asyncio.wait(left)
        computed = prefill.counts.requests["length"]
        running = asyncio.create_task(cluster.answer(request(PROMPT, temperature=0.0, max_tokens=2)))
        await until(lambda: len(cluster.workers[0].received) == 3)
        assert prefill.counts.requests["length"] > computed
        assert (await running).tokens == {(0, 0): _right()[:2]}


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.anyio
async def test_prefill_that_restarts_is_queried_for_its_engine_again(connector: Connector) -> None:
    async with WorkerCluster("PD", _of(connector)).serving() as cluster:
        registry, worker = cluster.control.registry, cluster.workers[0]
        others = {one.description.epoch for one in registry.living()}
        engine_id = worker.ranks[0].engine_id
        await worker.stop()
        await worker.start()
        await until(lambda: {one.description.epoch for one in registry.living()} - others)
        assert (await cluster.answer(_greedy())).tokens == {(0, 0): _right()}
        asked = cluster.workers[1].received[-1].body["kv_transfer_params"]
        assert asked["remote_engine_id"] == worker.ranks[0].engine_id != engine_id


@pytest.mark.parametrize(
    ("connector", "prefill", "decode", "version", "why"),
    [
        ("nixl-push", "nixl", "nixl", "0.32.0", "its connector is not NixlPushConnector: use --connector nixl"),
        (
            "nixl-push",
            "nixl-push",
            "nixl-push",
            "0.26.0",
            "which NixlPushConnector sends from vLLM 0.32 on: use --connector auto",
        ),
        ("nixl-push", "none", "nixl-push", "0.32.0", "it holds no KV for another worker"),
        ("nixl-push", "nixl-push", "none", "0.32.0", ""),
        ("mooncake", "none", "mooncake", "0.32.0", "its Mooncake bootstrap server does not answer"),
    ],
)
@pytest.mark.anyio
async def test_a_pair_that_cannot_hand_off_is_named(
    connector: Connector, prefill: Connector, decode: Connector, version: str, why: str
) -> None:
    cluster = WorkerCluster("PD", _of(prefill, version=version), _of(decode, version=version))
    cluster.connector = connector
    async with contextlib.AsyncExitStack() as stack:
        starting = asyncio.create_task(stack.enter_async_context(cluster.serving()))
        if why:
            await until(lambda: any(why in str(gap) for gap in cluster.gaps()))
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
        else:
            await starting
            assert (await cluster.answer(_greedy())).tokens == {(0, 0): _right()}
            await until(lambda: cluster.control.registry.instance(1).load.prompts_recomputed >= 2)


@pytest.mark.anyio
async def test_a_nixl_worker_gets_no_request_of_mooncake() -> None:
    worker = FakeVllmWorker(SETTINGS)
    await worker.start()
    connection = WorkerConnection(worker.url, connector="mooncake")
    with pytest.raises(Incompatible, match="runs a NIXL connector, not MooncakeConnector"):
        await connection.describe(5.0)
    await connection.close()
    await worker.stop()


@pytest.mark.anyio
async def test_push_workers_are_served_prefill_first_by_auto() -> None:
    cluster = WorkerCluster("PD", _of("nixl-push"))
    cluster.connector = "auto"
    async with cluster.serving():
        assert (await cluster.answer(_greedy())).tokens == {(0, 0): _right()}
        prefill, decode = _legs(cluster)
        assert decode.body["kv_transfer_params"]["remote_request_id"].startswith(f"cmpl-{leg_id(prefill)}-0-")


_ANSWER = {
    "kv_transfer_params": {
        "do_remote_prefill": True, "remote_engine_id": "e", "remote_request_id": "cmpl-a-0-12345678",
        "remote_host": "h", "remote_port": 1, "remote_block_ids": [[1]], "tp_size": 1, "transfer_mode": "push",
        "remote_prefill_cached_tokens": 0, "any": 5,
    },
}  # fmt: skip


def test_push_passes_on_what_an_earlier_answer_said() -> None:
    transfer = PushedKv()
    assert transfer.early_reference("b") is None
    found = transfer.reference("a", _ANSWER)
    assert found["any"] == 5
    assert transfer.early_reference("b") == found | {"remote_request_id": "b"}
    changed = _ANSWER["kv_transfer_params"] | {"remote_engine_id": "other"}
    with pytest.raises(HandoffFailed, match="its engine is not the one that was sent to decode workers"):
        transfer.reference("b", {"kv_transfer_params": changed})


@pytest.mark.anyio
async def test_mooncake_knows_that_a_stop_keeps_no_kv() -> None:
    async def query() -> dict[str, Any]:
        return {"1": {"engine_id": "e"}}

    transfer = MooncakeKv("http://h:8998", 1, query)
    await transfer.prepare()
    assert transfer.reference("a", {"choices": [{"finish_reason": "length"}]})["remote_engine_id"] == "e"
    with pytest.raises(HandoffFailed, match="it finished the prompt by 'stop', not by length"):
        transfer.reference("a", {"choices": [{"finish_reason": "stop"}]})
    with pytest.raises(HandoffFailed, match="names no engine for rank 0"):
        await MooncakeKv("http://h:8998", 0, query).prepare()
