"""The budget of retries, alone and under a fault that hits many requests at once."""

import asyncio

import pytest

from scheduler.limits import ControlLimits
from scheduler.retry_budget import Retry, RetryBudget
from simulation.instance import SimulatedInstance
from tests.scheduler.fake_cluster import FakeCluster, collect, expected, request
from tests.scheduler.virtual_time import until, virtual
from wire.errors import DeadlineExceeded
from wire.messages import Prefill

LIMITS = ControlLimits(retry_share=0.2, min_retries=3, retry_window_s=60.0)


def no_room() -> bool:
    """Other prompts wait in the queue."""
    return False


async def start_retries(budget: RetryBudget, count: int) -> tuple[list[Retry], list[asyncio.Task[None]]]:
    """Start `count` retries at once, in order."""
    retries = [budget.retry() for _ in range(count)]
    tasks = [asyncio.create_task(retry.begin()) for retry in retries]
    await asyncio.sleep(0)
    return retries, tasks


@pytest.mark.parametrize(("active", "limit"), [(0, 3), (15, 3), (19, 3), (20, 4), (100, 20)])
@virtual
async def test_the_budget_is_a_fifth_of_active_requests_and_at_least_three(active: int, limit: int) -> None:
    budget = RetryBudget(LIMITS, lambda: active, no_room)
    _, tasks = await start_retries(budget, limit + 1)

    assert [task.done() for task in tasks] == [True] * limit + [False]
    assert (budget.limit, budget.num_under_way, budget.num_waiting, budget.is_spent) == (limit, limit, 1, True)
    tasks[-1].cancel()


@virtual
async def test_a_returned_place_goes_to_the_longest_waiting() -> None:
    budget = RetryBudget(LIMITS, lambda: 0, no_room)
    retries, tasks = await start_retries(budget, 6)
    tasks[3].cancel()
    await asyncio.sleep(0)
    retries[1].done()
    retries[1].done()
    await asyncio.sleep(0)

    assert [task.done() for task in tasks] == [True, True, True, True, True, False]
    assert tasks[3].cancelled()
    for retry in retries:
        retry.done()
    assert (budget.num_under_way, budget.num_waiting) == (0, 0)
    tasks[5].cancel()


@virtual
async def test_three_start_each_minute_even_if_all_of_them_hang() -> None:
    budget = RetryBudget(LIMITS, lambda: 0, no_room)
    loop = asyncio.get_running_loop()
    began = loop.time()
    _, tasks = await start_retries(budget, 9)
    await asyncio.wait(tasks)

    assert loop.time() - began == pytest.approx(120.0)
    assert budget.num_under_way == 3


@virtual
async def test_a_cancel_between_the_turn_and_its_use_loses_no_place() -> None:
    budget = RetryBudget(LIMITS, lambda: 0, no_room)
    retries, tasks = await start_retries(budget, 4)
    retries[0].done()  # the fourth has its turn, and is cancelled before it runs
    tasks[3].cancel()
    await asyncio.wait(tasks)

    assert (budget.num_under_way, budget.num_waiting) == (2, 0)


@virtual
async def test_a_waiter_cancelled_at_its_turn_passes_it_on() -> None:
    budget = RetryBudget(LIMITS, lambda: 0, no_room)
    retries, tasks = await start_retries(budget, 5)
    tasks[3].cancel()
    retries[0].done()  # the fourth has not run since its cancel: it is still in the queue
    await asyncio.sleep(0)

    assert [task.done() for task in tasks] == [True] * 5
    assert tasks[3].cancelled()
    assert not tasks[4].cancelled()
    assert (budget.num_under_way, budget.num_waiting) == (3, 0)


@virtual
async def test_with_room_retries_continue_one_after_another() -> None:
    room = [True]
    budget = RetryBudget(LIMITS, lambda: 0, lambda: room[0])
    retries, tasks = await start_retries(budget, 7)
    assert [task.done() for task in tasks] == [True] * 4 + [False] * 3  # the fourth is not placed yet

    retries[3].placed()
    await asyncio.sleep(0)
    assert tasks[4].done()
    room[0] = False
    retries[4].placed()
    await asyncio.sleep(0)
    assert [task.done() for task in tasks[5:]] == [False, False]

    room[0] = True
    retries[4].done()
    await asyncio.sleep(0)
    assert [task.done() for task in tasks[5:]] == [True, False]
    retries[5].done()  # it has ended before it was placed
    await asyncio.sleep(0)
    assert tasks[6].done()


@pytest.mark.parametrize("active", [0, 20], ids=["room in the queue", "a larger limit"])
@virtual
async def test_the_end_of_an_ordinary_prompt_wakes_a_waiting_retry(active: int) -> None:
    now = {"active": 0, "has room": False}
    limits = ControlLimits(retry_share=0.2, min_retries=0)
    budget = RetryBudget(limits, lambda: now["active"], lambda: bool(now["has room"]))
    ordinary = budget.retry()
    _, tasks = await start_retries(budget, 1)
    assert not tasks[0].done()

    now |= {"active": active, "has room": not active}
    ordinary.done()
    await asyncio.sleep(0)
    assert tasks[0].done()


@pytest.mark.parametrize(("has_room", "at_once"), [(True, 10), (False, 4)])  # four: a fifth of twenty
@virtual
async def test_a_fault_of_many_requests_is_retried_at_once_if_room(has_room: bool, at_once: int) -> None:
    async with FakeCluster("PPD", prefill_chunk_size=512, max_num_seqs=100).serving() as cluster:
        dispatch = cluster.control.dispatch
        if not has_room:
            dispatch.retries = dispatch._attempts._retries = RetryBudget(
                LIMITS, lambda: dispatch.ledger.inflight, no_room
            )
        cluster.instances[0].behaviour.step_s = cluster.instances[1].behaviour.step_s = 0.5
        prompts = [(i, 1, 2) for i in range(20)]
        readers = [asyncio.create_task(collect(dispatch, request(prompt))) for prompt in prompts]
        await until(lambda: all(len(instance.prompts) == 10 for instance in cluster.instances[:2]))
        cluster.kill(0)
        peak = 0
        while not all(reader.done() for reader in readers):
            peak = max(peak, cluster.control.view().retries.under_way)
            await asyncio.sleep(0.001)

        assert [reader.result().tokens[0, 0] for reader in readers] == [expected(prompt, 4) for prompt in prompts]
        assert peak == at_once
        ledger, view = dispatch.ledger, cluster.control.view()
        assert (ledger.retried_prompts, ledger.completed) == (10, 20)
        assert (view.ledger.delayed_retries > 0) is not has_room
        assert (view.retries.under_way, view.retries.waiting, view.retries.limit) == (0, 0, 3)


@virtual
async def test_a_retry_without_budget_ends_at_the_requests_limit() -> None:
    limits = ControlLimits(min_retries=1)
    async with FakeCluster("PPD", limits=limits, prefill_chunk_size=512).serving() as cluster:
        cluster.instances[1].behaviour.step_s = 100.0
        dispatch = cluster.control.dispatch
        dispatch.retries = dispatch._attempts._retries = RetryBudget(limits, lambda: dispatch.ledger.inflight, no_room)
        hung = await start_retries(dispatch.retries, 1)
        cluster.instances[0].behaviour.step_s = 0.5
        reader = asyncio.create_task(collect(cluster.control.dispatch, request((1, 2), limits_s=(5.0, 5.0))))
        await until(lambda: bool(holds(cluster.instances[0])))
        cluster.kill(0)

        words = r"no first token within 5 s, waiting to be retried: 1 retry is running \(limit 1\)"
        with pytest.raises(DeadlineExceeded, match=words):
            await reader
        assert not any(isinstance(command, Prefill) for command in cluster.instances[1].commands)
        assert hung[1][0].done()
        assert cluster.control.dispatch.retries.num_waiting == 0


def holds(instance: SimulatedInstance) -> list[str]:
    """Return the ids of its prompts."""
    return list(instance.prompts)
