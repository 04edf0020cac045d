"""Failures reported for other routers and for vLLM, by the numbers of the reports: none may happen here."""

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from scheduler.config import SchedulerOptions
from scheduler.limits import ControlLimits
from scheduler.request import GenerationRequest
from scheduler.workers import prefill_legs
from scheduler.workers import session as worker_session
from scheduler.workers.answers import SequenceStream
from scheduler.workers.engine_ids import EngineIds
from scheduler.workers.http import WorkerHttp
from scheduler.workers.load import WorkerLoad
from scheduler.workers.session import WorkerSession
from testing.vllm_worker.faults import Fault
from testing.vllm_worker.settings import Connector
from testing.vllm_worker.worker import FakeVllmWorker
from tests.scheduler.fake_cluster import Answer, Running, describe, request
from tests.scheduler.virtual_time import until, virtual
from tests.scheduler.worker_cluster import WorkerCluster, with_fake
from wire.errors import DeadlineExceeded, HandoffFailed, InstanceLost, InternalError, PdserveError, Unavailable
from wire.load import LoadSnapshot
from wire.messages import Heartbeat, PrefillAndHold, SessionOpen
from wire.types import PromptState, Role, SamplingParams

PROMPT = tuple(range(10, 60))
LENGTH = 24
STEP_S = 0.005
WRONG_200 = dataclasses.replace(with_fake(step_seconds=STEP_S), wrong_200=True)
"""Workers that answer a stale reference with garbage and status 200."""
SOON = ControlLimits(refused_retry_s=0.1)


def _wanted(number: int = 0, **fields: Any) -> GenerationRequest:
    fields = {"temperature": 0.0, "max_tokens": LENGTH} | fields
    return request((5 + number, *PROMPT), seed=number, **fields)


async def _right(*wanted: GenerationRequest) -> list[Any]:
    async with WorkerCluster("C", with_fake()).serving() as cluster:
        return [(await cluster.answer(one)).tokens for one in wanted]


def _tokens(answers: list[Answer]) -> list[Any]:
    return [answer.tokens for answer in answers]


async def _whole(cluster: WorkerCluster) -> None:
    registry = cluster.control.registry
    await until(lambda: not (registry.missing() or registry.gaps()))


def _runs(worker: FakeVllmWorker) -> int:
    return worker.ranks[0].running


def _references(*workers: FakeVllmWorker) -> list[str]:
    found = [one.body.get("kv_transfer_params") for worker in workers for one in worker.received]
    return [one["remote_request_id"] for one in found if one]


async def unknown_request_id() -> None:
    """P starts again, with the engine id that was typed, while the request waits on D."""
    prefill = dataclasses.replace(WRONG_200, engine_id="typed")
    decode = dataclasses.replace(with_fake(step_seconds=0.02), max_num_seqs=1)
    wanted = [_wanted(1, max_tokens=60), _wanted(2)]
    right = await _right(*wanted)
    other = dataclasses.replace(prefill, engine_id="typed too")
    async with WorkerCluster("PPD", prefill, other, decode).serving() as cluster:
        *starts, end = cluster.workers
        tasks = [asyncio.create_task(cluster.answer(wanted[0]))]
        await until(lambda: end.ranks[0].running)
        for worker in starts:
            worker.received.clear()
        tasks.append(asyncio.create_task(cluster.answer(wanted[1])))
        await until(lambda: end.ranks[0].waiting)
        (holder,) = [worker for worker in starts if worker.received]
        await holder.stop()
        await holder.start()

        assert _tokens(await asyncio.gather(*tasks)) == right


async def unknown_request_id_of_a_second_sequence() -> None:
    """P starts again while the first sequence runs on D, and the second one waits there."""
    prefill = dataclasses.replace(WRONG_200, engine_id="typed")
    decode = dataclasses.replace(with_fake(step_seconds=0.02), max_num_seqs=1)
    wanted = _wanted(n=2, temperature=0.8)
    right = await _right(wanted)
    other = dataclasses.replace(prefill, engine_id="typed too")
    async with WorkerCluster("PPD", prefill, other, decode).serving() as cluster:
        *starts, end = cluster.workers
        running = Running(cluster.control.dispatch, wanted)
        await until(lambda: running.tokens and end.ranks[0].waiting)
        (holder,) = [worker for worker in starts if worker.received]
        await holder.stop()
        await holder.start()

        await running.task
        assert [running.tokens] == right


async def blocks_out_of_range() -> None:
    """Such a pair never serves: its proof fails."""
    prefill = dataclasses.replace(WRONG_200, block_offset=1_000_000)
    with pytest.raises(DeadlineExceeded, match="have not answered like decode-0 alone: token 0 is"):
        async with WorkerCluster("PD", prefill, WRONG_200).serving(path_s=2.0):
            pass


async def consumed_reference() -> None:
    """D fails after it has read the KV: the next attempt gets another reference."""
    wanted = _wanted(temperature=0.8)
    right = await _right(wanted)
    async with WorkerCluster("PDD", WRONG_200).serving() as cluster:
        cluster.workers[1].faults.add(Fault("error", "during", "decode", after_tokens=5))
        answers = [await cluster.answer(wanted) for _ in range(3)]
        used = _references(*cluster.workers[1:])

        assert _tokens(answers) == right * 3
        assert len(used) == len(set(used)) == sum(answer.done[0].tries for answer in answers) > 3


async def stale_reference_of_reused_blocks() -> None:
    """P has blocks for two prompts; others take them as soon as D, which then fails, has read them."""
    prefill = dataclasses.replace(WRONG_200, fake=dataclasses.replace(WRONG_200.fake, num_blocks=9))
    wanted = [_wanted(number, temperature=0.8) for number in range(6)]
    right = await _right(*wanted)
    async with WorkerCluster("PDD", prefill, WRONG_200).serving() as cluster:
        cluster.workers[1].faults.add(Fault("error", "during", "decode", after_tokens=5, times=2))
        answers = await asyncio.gather(*map(cluster.answer, wanted))

        assert _tokens(answers) == right


async def expired_lease() -> None:
    """KV that D never fetched expires on P; the same prompt is sent again."""
    prefill = dataclasses.replace(WRONG_200, lease_s=0.2)
    wanted = _wanted()
    right = await _right(wanted)
    async with WorkerCluster("PD", prefill, WRONG_200, limits=SOON).serving() as cluster:
        start, end = cluster.workers
        end.faults.add(Fault("error", "before", "decode"))
        first = await cluster.answer(wanted)
        await until(lambda: not start.ranks[0].kv_usage)
        assert start.ranks[0].counts.expired == 1

        assert _tokens([first, await cluster.answer(wanted)]) == right * 2
        assert start.ranks[0].counts.reads_after_expiry == 0


CASES = [
    unknown_request_id, unknown_request_id_of_a_second_sequence, blocks_out_of_range, consumed_reference,
    stale_reference_of_reused_blocks, expired_lease,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.anyio
async def test_vllm_52234_no_answer_from_a_stale_reference(case: Callable[[], Awaitable[None]]) -> None:
    await case()


@pytest.mark.anyio
async def test_vllm_52234_a_lease_that_ends_on_a_full_decode_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """D begins with the prompt only when P has freed its blocks: D is full until then."""
    monkeypatch.setattr(prefill_legs, "LEASE_S", 0.6)
    monkeypatch.setattr(worker_session, "_POLL_S", 0.1)
    prefill = dataclasses.replace(WRONG_200, lease_s=1.0)
    decode = dataclasses.replace(with_fake(step_seconds=0.02), max_num_seqs=1)
    wanted = [_wanted(1, max_tokens=100), _wanted(2)]
    right = await _right(*wanted)
    async with WorkerCluster("PD", prefill, decode).serving() as cluster:
        start, end = cluster.workers
        first = asyncio.create_task(cluster.answer(wanted[0]))
        await until(partial(_runs, end))
        second = await cluster.answer(wanted[1])

        assert _tokens([await first, second]) == right
        assert second.done[0].tries == 1, "no failure: the worker was full"
        assert len(set(_references(end))) == len(_references(end)) > 2
        assert start.ranks[0].counts.reads_after_expiry == 0


@pytest.mark.anyio
async def test_a_read_after_the_lease_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only prefill's counters show it: decode's answer is a 200 (vllm.distributed, kv_connector.v1.nixl.stats)."""
    monkeypatch.setattr(worker_session, "_POLL_S", 0.05)
    caplog.set_level(logging.INFO)
    async with WorkerCluster("PD").serving() as cluster:
        prefill = cluster.workers[0].ranks[0]
        await asyncio.sleep(0.2)
        prefill.counts.reads_after_expiry += 2
        prefill.counts.expired += 3
        await until(lambda: "kv_read_late" in caplog.text and "kv_expired" in caplog.text)

        assert f"kv_read_late url={cluster.workers[0].url} count=2" in caplog.text
        assert f"kv_expired url={cluster.workers[0].url} count=3" in caplog.text


@pytest.mark.anyio
async def test_vllm_ascend_13140_a_dead_worker_is_left_and_taken_back() -> None:
    wanted = [_wanted(number) for number in range(8)]
    right = await _right(*wanted)
    async with WorkerCluster("PPDD", WRONG_200).serving() as cluster:
        dead = cluster.workers[0], cluster.workers[2]
        for worker in dead:
            await worker.stop()
        await until(lambda: len(cluster.control.registry.missing()) == 2)
        answers = [await cluster.answer(one) for one in wanted]
        assert _tokens(answers) == right
        assert {answer.done[0].tries for answer in answers} == {1}

        for worker in dead:
            worker.received.clear()
            await worker.start()
        await _whole(cluster)
        assert _tokens(list(await asyncio.gather(*map(cluster.answer, wanted)))) == right
        assert all(worker.received for worker in dead)


@pytest.mark.anyio
async def test_vllm_ascend_13140_an_empty_answer_of_decode_is_an_error() -> None:
    wanted = _wanted()
    async with WorkerCluster("PD", WRONG_200, limits=SOON).serving() as cluster:
        cluster.workers[1].faults.add(Fault("empty", "before", "decode", times=2))
        with pytest.raises(PdserveError):
            await cluster.answer(wanted)
        await _whole(cluster)
        assert (await cluster.answer(wanted)).tokens == (await _right(wanted))[0]


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["append", "again"])
@pytest.mark.anyio
async def test_a_sequence_that_decode_gives_up_is_continued(temperature: float) -> None:
    """More often than failures are retried: vllm-ascend's recompute scheduler makes room for others."""
    wanted = _wanted(temperature=temperature)
    (right,) = await _right(wanted)
    async with WorkerCluster("PDD", WRONG_200).serving() as cluster:
        for number, worker in enumerate(cluster.workers[1:]):
            worker.faults.add(Fault("recompute", "during", "decode", after_tokens=3 + number, times=2))
        answer = await cluster.answer(wanted)

        assert answer.tokens == right
        assert answer.done[0].tries == 1, "no failure of a pair, which would have to be proven again"
        assert not cluster.gaps()


@pytest.mark.anyio
async def test_smg_2382_decode_workers_that_come_and_go_cost_no_answer() -> None:
    wanted = [_wanted(number, temperature=0.8 if number % 2 else 0.0) for number in range(6)]
    right = await _right(*wanted)
    async with WorkerCluster("PPDD", WRONG_200).serving() as cluster:
        for worker in cluster.workers[2:] * 2:
            tasks = [asyncio.create_task(cluster.answer(one)) for one in wanted]
            await until(partial(_runs, worker))
            await worker.stop()
            await until(cluster.control.registry.missing)
            await worker.start()
            assert _tokens(await asyncio.gather(*tasks)) == right
            await _whole(cluster)


@pytest.mark.anyio
async def test_smg_2382_pairs_whose_hand_offs_fail_serve_no_more() -> None:
    wanted = _wanted()
    (right,) = await _right(wanted)
    async with WorkerCluster("PPPD", WRONG_200).serving() as cluster:
        for worker in cluster.workers[:2]:  # all reads of its KV fail from now on, and it does not report that
            worker.faults.add(Fault("error", "read", times=10_000))
        failed = 0
        while {gap.sender for gap in cluster.control.registry.gaps()} != {0, 1}:
            try:
                assert (await cluster.answer(wanted)).tokens == right
            except InternalError:
                failed += 1

        assert failed <= 2, "a request fails on two pairs, and a pair serves until it has failed twice"
        assert _tokens([await cluster.answer(wanted) for _ in range(4)]) == [right] * 4


@pytest.mark.anyio
async def test_a_pair_serves_until_two_requests_failed_on_it() -> None:
    limits = ControlLimits(probe_after_s=3600.0)
    async with WorkerCluster("PD", WRONG_200, limits=limits).serving() as cluster:
        for is_out in (False, True):
            cluster.workers[1].faults.add(Fault("error", "before", "decode", times=2))
            with pytest.raises(InternalError):
                await cluster.answer(_wanted())
            assert bool(cluster.gaps()) is is_out


@pytest.mark.parametrize("when_gone", ["local", "fail"])
@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.anyio
async def test_the_last_worker_of_a_role_dies(leg: Any, when_gone: str) -> None:
    flags = dict.fromkeys(("when_prefill_is_gone", "when_decode_is_gone"), "fail" if when_gone == "local" else "local")
    options = SchedulerOptions(**flags | {f"when_{leg}_is_gone": when_gone})  # type: ignore[arg-type]
    wanted, limits = _wanted(), dataclasses.replace(SOON, may_lack=options.may_lack())
    (right,) = await _right(wanted)
    async with WorkerCluster("PD", WRONG_200, limits=limits).serving() as cluster:
        victim = cluster.workers[leg == "decode"]
        victim.faults.add(Fault("die", "before", leg))
        if when_gone == "local":
            answer = await cluster.answer(wanted)
            assert (answer.tokens, answer.done[0].path, answer.done[0].tries) == (right, "local", 2)
        else:
            for error in (PdserveError, Unavailable):  # that of the request under way, and 503 for others
                with pytest.raises(error):
                    await cluster.answer(wanted)

        await victim.stop()
        await victim.start()
        await _whole(cluster)
        again = await cluster.answer(wanted)
        assert (again.tokens, again.done[0].path) == (right, "prefill_first")


@pytest.mark.anyio
async def test_kv_that_a_dead_decode_worker_left_counts_as_used() -> None:
    lasting = dataclasses.replace(WRONG_200, lease_s=3.0)
    async with WorkerCluster("PD", lasting).serving() as cluster:
        prefill, ledger = cluster.workers[0].ranks[0], cluster.control.registry.instance(0).in_flight
        cluster.workers[1].faults.add(Fault("die", "before", "decode"))
        with pytest.raises(PdserveError):
            await cluster.answer(_wanted())
        free: set[int] = set()

        def is_over() -> bool:
            free.add(ledger.blocks_free)
            return prefill.kv_usage == 0

        await until(is_over)

        assert max(free) <= ledger.load.blocks_total - 4, "no moment at which the four blocks seemed free"
        await until(lambda: ledger.blocks_free == ledger.load.blocks_total)


def test_smg_2382_an_answer_that_ended_by_an_error_is_no_answer() -> None:
    stream = SequenceStream(PromptState("a", "r", PROMPT, SamplingParams(max_tokens=9), ((),)), 0, 0)
    with pytest.raises(InstanceLost, match="it ended the sequence with 'error'"):
        stream.feed(b'data: {"choices": [{"index": 0, "token_ids": [], "finish_reason": "error"}]}\n\n')


@virtual
async def test_a_failure_waits_for_a_check_that_began_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    began = 0

    async def read_load(timeout_s: float) -> WorkerLoad:
        nonlocal began
        began += 1
        if began > 1:
            await asyncio.sleep(0.1)
            raise InstanceLost("it is gone")
        await asyncio.sleep(0.5)
        return WorkerLoad(LoadSnapshot())

    async def break_off(*_: object) -> None:
        raise InstanceLost("the connection broke")

    http = WorkerHttp("http://127.0.0.1:1")
    monkeypatch.setattr(http, "post_json", break_off)
    session = WorkerSession(describe(0, Role.PREFILL), "m", http, read_load, LoadSnapshot())
    session.look_now()
    await until(lambda: began)
    await session.send(PrefillAndHold(PromptState("a", "r", PROMPT, SamplingParams(max_tokens=9), ((),))))
    events = []

    async def read_events() -> None:
        async for event in session.events():
            events.append(type(event))

    with pytest.raises(InstanceLost, match="it is gone"):
        await read_events()
    assert events == [SessionOpen, Heartbeat]
    await session.close()


@pytest.mark.parametrize("connector", ["nixl", "nixl-push", "mooncake"])
@pytest.mark.anyio
async def test_two_workers_with_one_engine_id_give_no_wrong_answer(connector: Connector) -> None:
    """Decode finds KV by the id alone; a proof of the second pair passes while the first worker has that prompt too."""
    typed = dataclasses.replace(with_fake(), engine_id="typed", connector=connector)
    cluster, wanted = (
        WorkerCluster("PPD", typed, typed, dataclasses.replace(typed, engine_id=None), limits=SOON),
        [*map(_wanted, range(6))],
    )
    right = await _right(*wanted)
    serving = asyncio.create_task(_serve(cluster))
    try:
        await until(lambda: _is_refused(cluster))
        answers = await asyncio.gather(*map(cluster.answer, wanted))
        assert len({answer.done[0].prefill_instance for answer in answers}) == 1
        (owner,) = [one for one in cluster.workers if f"also that of {one.url}" in str(cluster.gaps())]
        await owner.hide()
        await until(cluster.control.registry.missing)
        await asyncio.sleep(10 * SOON.refused_retry_s)
        assert _is_refused(cluster), "decode knows the first one by this id, and can still read its KV"

        cluster.control.registry.change(cluster.without(cluster.workers.index(owner)), "the worker has moved")
        if connector == "nixl":  # of the others decode asks the address that the reference names
            await until(lambda: "have not answered like decode-0 alone: token 0" in str(cluster.gaps()))
        await owner.stop()
        await until(cluster.control.registry.has_path)
        answers += await asyncio.gather(*map(cluster.answer, wanted))
    finally:
        serving.cancel()
        await asyncio.wait({serving})
    assert _tokens(answers) == right * 2


def test_an_engine_id_is_free_once_its_owner_has_another_or_moved() -> None:
    listed = {"first", "second", "moved"}
    ids = EngineIds(listed.__contains__)
    ids.claim("e", "first")
    with pytest.raises(HandoffFailed, match="its engine_id e is also that of first"):
        ids.claim("e", "second")
    ids.claim("its next life's", "first")
    ids.claim("e", "second")
    for number in range(10_000):
        ids.claim("e", "second")
        ids.claim(f"e{number}", f"{number}")
    ids.claim("its next life's", "third: the first was not seen for long")
    with pytest.raises(HandoffFailed, match="is also that of second"):
        ids.claim("e", "first")
    listed.remove("second")
    ids.claim("e", "moved")
    with pytest.raises(HandoffFailed, match="is also that of moved"):
        ids.claim("e", "second")


def _is_refused(cluster: WorkerCluster) -> bool:
    return any("engine_id typed_dp0 is also that of http" in str(gap) for gap in cluster.gaps())


async def _serve(cluster: WorkerCluster) -> None:
    async with cluster.serving():
        await asyncio.Event().wait()
