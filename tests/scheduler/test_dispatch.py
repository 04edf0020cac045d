"""Accepting, queueing, counting and finishing requests."""

import asyncio
import dataclasses
import logging

import pytest

from scheduler.limits import ControlLimits
from scheduler.load.loads import PromptFacts
from tests.scheduler.fake_cluster import FakeCluster, collect, expected, request
from tests.scheduler.virtual_time import until, virtual
from wire.errors import DeadlineExceeded, Draining, InternalError, InvalidGrammar, Overloaded, Unavailable
from wire.messages import Prefill

LONG = tuple(range(100))


@virtual
async def test_without_a_path_a_refusal_names_what_is_missing() -> None:
    cluster = FakeCluster("PD")
    cluster.boot(0)
    running = asyncio.create_task(cluster.control.run())
    await asyncio.sleep(1.0)

    with pytest.raises(Unavailable, match=r"missing: decode-0$"):
        await collect(cluster.control.dispatch, request(LONG))
    assert cluster.control.dispatch.ledger.rejected == 1
    assert cluster.control.dispatch.ledger.received == 0
    running.cancel()


@pytest.mark.parametrize(
    ("limits", "counts"),
    [(ControlLimits(max_queued_requests=2), [1, 0, 0]), (ControlLimits(max_queued_tokens=250), [0, 1, 0])],
)
@virtual
async def test_a_full_queue_is_refused_with_retry_after(limits: ControlLimits, counts: list[int]) -> None:
    async with FakeCluster("PD", limits=limits).serving() as cluster:
        cluster.instances[0].get_stuck()
        dispatch = cluster.control.dispatch
        readers = [asyncio.create_task(collect(dispatch, request(LONG))) for _ in range(3)]
        await asyncio.sleep(0)
        assert dispatch.admission.num_waiting == 2

        with pytest.raises(Overloaded, match=r"limit 2|limit 250") as caught:
            await collect(dispatch, request(LONG))
        assert caught.value.retry_after_s >= 1
        assert list(dispatch.ledger.rejections.values()) == counts
        for reader in readers:
            reader.cancel()


@virtual
async def test_the_queue_is_checked_for_room_before_a_request_exists() -> None:
    async with FakeCluster("PD", limits=ControlLimits(max_queued_requests=2)).serving() as cluster:
        cluster.instances[0].get_stuck()
        dispatch = cluster.control.dispatch
        readers = []
        for _ in range(3):  # the first is on its way to the instance, two wait
            dispatch.check_room("")
            readers.append(asyncio.create_task(collect(dispatch, request(LONG))))
        await asyncio.sleep(0)

        with pytest.raises(Overloaded, match="limit 2"):
            dispatch.check_room("")
        assert (dispatch.ledger.received, dispatch.ledger.rejected) == (3, 1)
        cluster.kill(1)
        await until(lambda: not cluster.control.registry.has_path())
        dispatch.check_room("")  # the missing path matters more now: `start` reports it
        for reader in readers:
            reader.cancel()


@virtual
async def test_a_client_error_is_no_warning_and_its_grammar_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "pdserve")
    async with FakeCluster("PD").serving() as cluster:
        for instance in cluster.instances:
            instance.behaviour.refuse.extend([InvalidGrammar.__name__, InternalError.__name__, InternalError.__name__])
        for error in (InvalidGrammar, InternalError):
            with pytest.raises(error):
                await collect(cluster.control.dispatch, request(LONG))

    (reported,) = [record.getMessage() for record in caplog.records if "request_failed" in record.getMessage()]
    assert "error=InternalError" in reported


@virtual
async def test_prompts_are_served_first_in_first_out() -> None:
    async with FakeCluster("PD").serving() as cluster:
        ended: list[int] = []

        async def read(number: int) -> None:
            await collect(cluster.control.dispatch, request((*LONG, number)))
            ended.append(number)

        async with asyncio.TaskGroup() as tasks:
            for number in range(10):
                tasks.create_task(read(number))

        assert ended == list(range(10))


@virtual
async def test_a_key_with_one_request_does_not_wait_for_anothers_hundred() -> None:
    async with FakeCluster("PD").serving() as cluster:
        ended: list[str] = []

        async def read(tenant: str, priority: int = 0) -> None:
            requested = dataclasses.replace(request(LONG), tenant=tenant, priority=priority)
            await collect(cluster.control.dispatch, requested)
            ended.append(tenant)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(100):
                tasks.create_task(read("busy"))
            tasks.create_task(read("late", priority=1))
            tasks.create_task(read("quiet"))

        assert ended.index("quiet") < 8
        assert ended[-1] == "late"


@virtual
async def test_a_key_is_charged_for_the_output_of_its_requests() -> None:
    async with FakeCluster("PD").serving() as cluster:
        costs = cluster.control.dispatch.admission.costs
        unknown = PromptFacts(100, 4000)
        before = costs.cost("one", unknown)
        await collect(cluster.control.dispatch, dataclasses.replace(request(LONG, LONG, n=2), tenant="one"))

        assert costs.cost("one", unknown) < before
        assert costs.cost("other", unknown) == before


@virtual
async def test_a_prefill_instance_never_queues_more_than_its_next_step() -> None:
    async with FakeCluster("PD", num_blocks=1000).serving() as cluster:
        readers = [asyncio.create_task(collect(cluster.control.dispatch, request(LONG))) for _ in range(8)]
        peak = 0
        while not all(reader.done() for reader in readers):
            waiting = [p for p in cluster.instances[0].prompts.values() if p.stage == "waiting"]
            peak = max(peak, len(waiting))
            await asyncio.sleep(0.001)

        assert peak == 2
        assert all(reader.result().tokens[0, 0] == expected(LONG, 4) for reader in readers)


@virtual
async def test_the_queue_continues_after_decode_was_full() -> None:
    async with FakeCluster("PD", num_blocks=8).serving() as cluster:
        readers = [asyncio.create_task(collect(cluster.control.dispatch, request(LONG))) for _ in range(6)]
        await asyncio.wait(readers)

        assert all(reader.result().finishes for reader in readers)
        assert cluster.control.dispatch.ledger.completed == 6


@virtual
async def test_the_first_token_limit_includes_the_time_in_the_queue() -> None:
    async with FakeCluster("PD").serving() as cluster:
        cluster.instances[0].get_stuck()
        first = asyncio.create_task(collect(cluster.control.dispatch, request(LONG)))
        await asyncio.sleep(0.1)

        with pytest.raises(DeadlineExceeded, match="no first token within 2 s, waiting in the queue"):
            await collect(cluster.control.dispatch, request(LONG, limits_s=(2.0, 2.0)))
        assert cluster.control.dispatch.admission.num_waiting == 0
        first.cancel()


@virtual
async def test_queued_requests_fail_when_the_last_path_is_lost() -> None:
    async with FakeCluster("PD").serving() as cluster:
        cluster.instances[0].get_stuck()
        readers = [asyncio.create_task(collect(cluster.control.dispatch, request(LONG))) for _ in range(5)]
        await asyncio.sleep(0.1)
        cluster.kill(0)
        await asyncio.wait(readers, timeout=3.0)

        reported = {str(reader.exception()) for reader in readers} - {"prefill-0 was lost: its connection broke"}
        assert reported == {"no path can serve this now; missing: prefill-0"}
        assert all(isinstance(reader.exception(), Unavailable) for reader in readers)
        assert cluster.control.dispatch.ledger.failed == 5
        assert cluster.control.dispatch.ledger.inflight == 0


@virtual
async def test_closing_lets_running_requests_finish_and_refuses_new_ones() -> None:
    async with FakeCluster("PD").serving() as cluster:
        dispatch = cluster.control.dispatch
        reader = asyncio.create_task(collect(dispatch, request(LONG)))
        endless = asyncio.create_task(collect(dispatch, request(LONG, max_tokens=900)))
        await asyncio.sleep(0)
        closing = asyncio.create_task(dispatch.close(5.0))
        await asyncio.sleep(0)

        with pytest.raises(Draining):
            await collect(dispatch, request(LONG))
        assert (await reader).finishes
        with pytest.raises(Draining):
            await endless
        await closing
        await until(lambda: cluster.blocks_used == [0, 0])


@virtual
async def test_each_prompt_runs_with_its_own_seed() -> None:
    async with FakeCluster("PD").serving() as cluster:
        two = dataclasses.replace(request(LONG, LONG), seeds=(5, 6))
        await collect(cluster.control.dispatch, two)

        prefills = [command for command in cluster.instances[0].commands if isinstance(command, Prefill)]
        assert [prefill.prompt.params.seed for prefill in prefills] == [5, 6]
