"""Each point of a request's two legs and each fault of a worker, on fake workers in this process.

tests/faults/test_workers.py has the same table with a process for each worker.
"""

import asyncio

import pytest

from scheduler.limits import ControlLimits
from scheduler.request import GenerationRequest
from testing.vllm_worker.faults import Action, Fault
from tests.faults.worker_points import POINTS
from tests.scheduler.fake_cluster import Answer, request
from tests.scheduler.worker_cluster import WorkerCluster, with_fake
from wire.errors import PdserveError

LENGTH = 24
ACTIONS: tuple[tuple[Action, ...], ...] = (("die",), ("drop",), ("error",), ("stop", "hang"))
"""The faults; those whose rows wait for a silent worker do so at the same time."""
LIMITS = ControlLimits(probe_after_s=3600.0)  # a probe would take the fault


def _requests() -> list[GenerationRequest]:
    """Greedy and sampled ones, each with a prompt of its own that fills some blocks."""
    return [
        request(
            (5 + number, *range(20, 60 + number)), max_tokens=LENGTH, temperature=0.8 * (number % 2), seed=number,
            limits_s=(60.0, 30.0),
        )
        for number in range(6)
    ]  # fmt: skip


@pytest.mark.parametrize("actions", ACTIONS, ids=" ".join)
@pytest.mark.anyio
async def test_a_fault_at_each_point_loses_no_request(actions: tuple[Action, ...]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for action in actions:
            for point, (_, when, _) in POINTS.items():
                if when is not None or action == "die":
                    tasks.create_task(_meet(point, action))


async def _meet(point: str, action: Action) -> None:
    """Send requests to two P and two D, one of which meets the fault; each must end right, or with an error."""
    leg, when, after_tokens = POINTS[point]
    async with WorkerCluster("PPDD", with_fake(step_seconds=0.002), limits=LIMITS).serving() as cluster:
        right = [(await cluster.answer(one)).tokens for one in _requests()]
        victim = cluster.workers[0 if leg == "prefill" else 2]
        for worker in cluster.workers:
            worker.prefilled.clear()
        fault = Fault(action, when or "before", leg, after_tokens)
        if when is None:
            await victim.stop()
        else:
            victim.faults.add(fault)
        answers = await asyncio.gather(*map(cluster.answer, _requests()), return_exceptions=True)

        shown = f"{point}, {action}: {answers}"
        for one, tokens, answer in zip(_requests(), right, answers, strict=True):
            if isinstance(answer, Answer):
                assert answer.tokens == tokens, shown
                reports = _reports(cluster, one)
                may_be_lost = leg == "prefill" and action in ("die", "drop")  # with the worker's other answers
                assert answer.done[0].times.cached_tokens in (reports if may_be_lost else reports[:1]), shown
            else:
                assert isinstance(answer, PdserveError), shown
        assert when is None or not fault.times, shown
        assert sum(isinstance(answer, Answer) for answer in answers) >= len(answers) - 1, shown


def _reports(cluster: WorkerCluster, wanted: GenerationRequest) -> list[int]:
    """Return the cached tokens of the prefills of a prompt that were answered, the first one first."""
    sent = [one for worker in cluster.workers for one in worker.prefilled if one.prompt == wanted.prompts[0]]
    return [one.cached_tokens for one in sorted(sent, key=lambda one: one.at)]
