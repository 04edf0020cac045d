"""How long a line waits before its next attempt. The runs are in test_runner.py."""

import asyncio
import json
import random
from typing import Any

import pytest

from batch.backend import Answer
from batch.inflight import Inflight
from batch.job import BatchStopped, RetryPolicy
from batch.line_attempts import LineAttempts
from telemetry.capped_logs import CappedLog
from telemetry.logs import EventLogger
from tests.batch.scripted import Scripted, echo, json_answer, line
from tests.scheduler.virtual_time import virtual
from wire.errors import Unavailable


def test_waits_double_up_to_a_limit_and_are_spread() -> None:
    policy = RetryPolicy(first_delay_s=1.0, max_delay_s=8.0)

    assert [policy.delay_s(failures, 0.0, 0.0) for failures in (1, 2, 3, 4, 5, 10**6)] == [0.5, 1, 2, 4, 4, 4]
    assert 7.9 < policy.delay_s(4, 0.0, 0.999) < 8.0


def test_a_retry_after_lengthens_a_wait_within_its_limit() -> None:
    policy = RetryPolicy(first_delay_s=1.0, max_delay_s=8.0, max_retry_after_s=60.0)

    assert policy.delay_s(1, 20.0, 0.0) == 20.0
    assert policy.delay_s(5, 1.0, 0.0) == 4.0
    assert policy.delay_s(1, 900.0, 0.0) == 60.0


@pytest.mark.parametrize(
    ("header", "minimum", "maximum"),
    [("7", 7.0, 8.0), ("Wed, 21 Oct 2026 07:28:00 GMT", 0.25, 0.5), ("-1", 0.25, 0.5), ("9" * 400, 0.25, 0.5)],
)
@pytest.mark.parametrize("status", [429, 503, 529])
def test_a_retry_after_is_waited_for(status: int, header: str, minimum: float, maximum: float) -> None:
    times: list[float] = []

    def script(n: Any, tries: int) -> Answer:
        times.append(asyncio.get_running_loop().time())
        return json_answer({}, status, retry_after=header) if tries == 1 else echo(n)

    @virtual
    async def run() -> None:
        attempts = LineAttempts(
            Scripted(script), RetryPolicy(), Inflight(1), random.Random(0), CappedLog(EventLogger("test"))
        )
        assert not (await attempts.send(json.dumps(line(0)).encode())).failed

    run()
    assert minimum <= times[1] - times[0] <= maximum


def _hanging_backend(probe: int | Exception) -> Scripted:
    backend = Scripted(probe=probe)
    backend.hold = asyncio.Event()
    return backend


@virtual
async def test_a_line_that_hangs_fails_after_its_only_attempt() -> None:
    backend = _hanging_backend(200)
    attempts = LineAttempts(
        backend, RetryPolicy(timeout_s=7.0), Inflight(1), random.Random(0), CappedLog(EventLogger("test"))
    )
    began = asyncio.get_running_loop().time()

    outcome = await attempts.send(json.dumps(line(0)).encode())

    assert asyncio.get_running_loop().time() - began == 7.0
    assert outcome.failed
    response = json.loads(outcome.line)["response"]
    assert response["status_code"] == 504
    assert response["body"]["error"]["message"] == "no complete answer within 7 s (--request-timeout)"
    assert (backend.requests[0], backend.cancelled) == (1, 1)


@virtual
async def test_a_line_that_waits_for_its_turn_does_not_hang() -> None:
    inflight = Inflight(1)

    async def other() -> Answer:
        await asyncio.sleep(100.0)
        return echo(1)

    attempts = LineAttempts(
        Scripted(), RetryPolicy(timeout_s=7.0), inflight, random.Random(0), CappedLog(EventLogger("test"))
    )
    async with asyncio.TaskGroup() as group:
        group.create_task(inflight.run(other))
        await asyncio.sleep(0)
        waiting = group.create_task(attempts.send(json.dumps(line(0)).encode()))

    assert not waiting.result().failed


@virtual
async def test_a_hang_of_a_server_that_is_gone_stops_the_run() -> None:
    policy = RetryPolicy(timeout_s=7.0)
    attempts = LineAttempts(
        _hanging_backend(Unavailable("no")), policy, Inflight(1), random.Random(0), CappedLog(EventLogger("test"))
    )

    with pytest.raises(BatchStopped, match=r"no complete answer within 7 s .*, and /health does not respond"):
        await attempts.send(json.dumps(line(0)).encode())
