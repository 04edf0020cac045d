"""Decode workers that get their request first and call back: the same answers as otherwise, or an early error."""

import asyncio
import contextlib
import dataclasses
from typing import Any

import aiohttp
import orjson
import pytest

from scheduler.limits import ControlLimits
from scheduler.request import GenerationRequest
from scheduler.workers import session as worker_session
from scheduler.workers.callbacks import Callbacks
from scheduler.workers.progress import Progress
from testing.engine.fake_model import expected_tokens
from testing.vllm_worker.faults import Action, Fault, Point
from testing.vllm_worker.settings import WorkerSettings
from tests.scheduler.fake_cluster import Running, request
from tests.scheduler.virtual_time import until
from tests.scheduler.worker_cluster import LEG_FAULTS, SETTINGS, WorkerCluster, leg_id, with_fake
from wire.errors import HandoffFailed, InternalError
from wire.load import LoadSnapshot
from wire.types import Role, SamplingParams

PROMPT = tuple(range(10, 60))
LENGTH = 24
LOCAL = frozenset({"localhost"})


def _layerwise(settings: WorkerSettings = SETTINGS, **changes: Any) -> WorkerSettings:
    return dataclasses.replace(settings, **{"connector": "ascend-layerwise"} | changes)


def _greedy(**changes: Any) -> GenerationRequest:
    return request(PROMPT, temperature=0.0, max_tokens=LENGTH, **changes)


def _right() -> list[int]:
    return list(expected_tokens(SETTINGS.fake, PROMPT, _greedy().params, count=LENGTH, salts=[0]))


@pytest.mark.anyio
async def test_decode_is_asked_first_and_prefill_sends_what_it_wants() -> None:
    async with WorkerCluster("PD", _layerwise()).serving() as cluster:
        answer = await cluster.answer(_greedy())
        assert answer.tokens == {(0, 0): _right()}
        assert answer.done[0].path == "decode_first"
        (prefill,), (decode,) = (worker.received for worker in cluster.workers)
        wanted, asked = prefill.body["kv_transfer_params"], decode.body["kv_transfer_params"]
        assert wanted["request_id"] == f"cmpl-{leg_id(prefill)}-0" == f"cmpl-{leg_id(decode)}-0"
        assert {"token_ids", "remote_block_ids", "remote_block_size", "remote_pcp_size"} < wanted.keys()
        assert (prefill.body["max_tokens"], prefill.body["min_tokens"]) == (1, 1)
        assert asked.keys() == {"do_remote_prefill", "do_remote_decode", "metaserver"}
        await until(lambda: not (cluster.kv_usage(Role.PREFILL) or cluster.kv_usage(Role.DECODE)))


@pytest.mark.anyio
async def test_each_sequence_has_a_callback_of_its_own() -> None:
    async with WorkerCluster("PD", _layerwise()).serving() as cluster:
        answer = await cluster.answer(request(PROMPT, PROMPT[:7], n=3, max_tokens=LENGTH, seed=5))
        assert len({tuple(ids) for ids in answer.tokens.values()}) == 6
        urls = [one.body["kv_transfer_params"]["metaserver"] for one in cluster.workers[1].received]
        assert len(set(urls)) == len(urls) == 6


@pytest.mark.parametrize(("leg", "point", "action"), [*LEG_FAULTS, ("decode", "before", "hang")])
@pytest.mark.anyio
async def test_a_leg_that_fails_is_done_again(leg: Any, point: Point, action: Action) -> None:
    limits = ControlLimits(reserve_s=2.0)  # of which only the one that hangs uses all
    async with WorkerCluster("PPDD", _layerwise(with_fake(step_seconds=0.002)), limits=limits).serving() as cluster:
        at = 0 if leg == "prefill" else 2
        cluster.workers[at].faults.add(Fault(action, point, leg, after_tokens=5 if point == "during" else 0))
        answers = [await cluster.answer(_greedy()) for _ in range(3)]
        assert [answer.tokens for answer in answers] == [{(0, 0): _right()}] * 3
        assert sum(answer.done[0].tries for answer in answers) <= 4
        await until(lambda: not cluster.kv_usage(Role.PREFILL))
        if (leg, point) == ("prefill", "before"):  # decode, which had called back, keeps the blocks
            await until(lambda: not any(rank.running + rank.waiting for one in cluster.workers for rank in one.ranks))
        else:
            await until(lambda: not cluster.kv_usage(Role.DECODE))


@pytest.mark.parametrize(
    ("decode", "why"),
    [
        ({"connector": "none"}, "it generated before it had requested the KV: does it run MooncakeLayerwiseConnector"),
        ({"side_channel_host": "10.9.9.9"}, "the KV is requested for a host other than the one in the worker's URL"),
        ({"fake": dataclasses.replace(SETTINGS.fake, salt=1)}, "have not answered like decode-0 alone: token 0 is"),
    ],
)
@pytest.mark.anyio
async def test_a_pair_that_cannot_hand_off_is_named_with_the_reason(decode: dict[str, Any], why: str) -> None:
    cluster = WorkerCluster("PD", _layerwise(), _layerwise(**decode))
    async with contextlib.AsyncExitStack() as stack:
        starting = asyncio.create_task(stack.enter_async_context(cluster.serving()))
        await until(lambda: any(why in str(gap) for gap in cluster.gaps()))
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting


@pytest.mark.anyio
async def test_a_client_that_leaves_frees_both_workers() -> None:
    async with WorkerCluster("PD", _layerwise(with_fake(step_seconds=0.05))).serving() as cluster:
        wanted = dataclasses.replace(_greedy(), params=SamplingParams(max_tokens=400, temperature=0.0))
        running = Running(cluster.control.dispatch, wanted, is_last=lambda token: token.index == 3)
        await asyncio.wait_for(running.task, 30.0)
        await until(lambda: not (cluster.kv_usage(Role.PREFILL) or cluster.kv_usage(Role.DECODE)))


@pytest.mark.often("0.33.0")
@pytest.mark.parametrize("version", ["0.26.0", "0.33.0"])
@pytest.mark.anyio
async def test_a_prompt_waits_for_a_full_decode_worker(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not call back while it is full: no failure of the request or of the pair."""
    monkeypatch.setattr(worker_session, "_POLL_S", 0.1)
    settings = _layerwise(with_fake(step_seconds=0.02), max_num_seqs=1, version=version)
    async with WorkerCluster("PD", settings, limits=ControlLimits(reserve_s=0.5)).serving() as cluster:
        end = cluster.workers[1].ranks[0]
        first = asyncio.create_task(cluster.answer(request(PROMPT, temperature=0.0, max_tokens=100)))
        await until(lambda: end.running == 1)
        others = [asyncio.create_task(cluster.answer(_greedy())) for _ in range(3)]
        answers = await asyncio.gather(*others)
        await first

        assert [(one.tokens, one.done[0].tries) for one in answers] == [({(0, 0): _right()}, 1)] * 3
        assert not cluster.gaps()
        assert len(cluster.workers[1].received) < 12, "few requests wait on a full worker at once"


@pytest.mark.anyio
async def test_a_client_that_leaves_in_prefill_frees_both() -> None:
    async with WorkerCluster("PD", _layerwise(with_fake(step_seconds=0.3))).serving() as cluster:
        prefill, decode = (worker.ranks[0] for worker in cluster.workers)
        computed = prefill.counts.requests["length"]
        running = asyncio.create_task(cluster.answer(_greedy()))
        await until(lambda: (prefill.running, decode.waiting) == (1, 1))
        running.cancel()
        await asyncio.wait({running})
        await until(lambda: not (cluster.kv_usage(Role.PREFILL) or cluster.kv_usage(Role.DECODE)))
        assert prefill.counts.requests["length"] == computed + 1, "prefill went on, for decode's blocks"


@pytest.mark.anyio
async def test_scores_that_fail_leave_no_blocks_on_decode() -> None:
    async with WorkerCluster("PD", _layerwise(), limits=ControlLimits(max_tries=1)).serving() as cluster:
        cluster.workers[0].faults.add(Fault("error", "before", "local"))
        with pytest.raises(InternalError):
            await cluster.answer(_greedy(prompt_logprobs=1))
        await until(lambda: not cluster.kv_usage(Role.DECODE))


GOOD = {"do_remote_decode": True, "remote_host": "127.0.0.1", "remote_port": 1, "any": [1]}


async def _post(url: str, body: Any) -> int:
    async with aiohttp.ClientSession() as session, session.post(url, data=orjson.dumps(body)) as answer:
        return answer.status


@pytest.mark.anyio
async def test_a_callback_is_taken_once_and_passed_on_unchanged() -> None:
    callbacks = Callbacks()
    async with callbacks.expect(LOCAL) as callback, callbacks.expect(LOCAL) as other:
        assert callback.url != other.url
        assert await _post(callback.url[:-1], GOOD) == 404
        assert await _post(callback.url, GOOD) == 200
        assert await callback.wait() == GOOD
        assert await _post(callback.url, GOOD) == 404
    assert await _post(other.url, GOOD) == 404
    await callbacks.close()


@pytest.mark.anyio
async def test_a_callback_from_another_host_is_refused() -> None:
    callbacks = Callbacks()
    async with callbacks.expect(frozenset({"10.9.9.9"})) as callback:
        assert await _post(callback.url, GOOD) == 403
    await callbacks.close()


@pytest.mark.parametrize(
    "body",
    [[], "x", {}, GOOD | {"do_remote_decode": False}, GOOD | {"remote_host": "10.9.9.9"}, GOOD | {"remote_host": 5}],
)
@pytest.mark.anyio
async def test_a_callback_with_something_else_is_an_error(body: Any) -> None:
    callbacks = Callbacks()
    async with callbacks.expect(LOCAL) as callback:
        assert await _post(callback.url, body) == 200
        with pytest.raises(HandoffFailed):
            await callback.wait()
    await callbacks.close()


@pytest.mark.parametrize(("running", "age_s"), [(0, 0.0), (1, 30.0)])
@pytest.mark.anyio
async def test_a_worker_that_waits_for_prefill_is_not_stuck(running: int, age_s: float) -> None:
    now = 0.0
    progress = Progress(lambda: now)
    load = LoadSnapshot(blocks_total=10, blocks_used=1, running=running, waiting=1, steps=5)
    progress.judged(load)
    with progress.leg(50, receives=True) as leg:
        now = 30.0
        assert progress.judged(load).progress_age_s == age_s
        leg.heard()
        now = 60.0
        assert progress.judged(load).progress_age_s == age_s + 30.0
