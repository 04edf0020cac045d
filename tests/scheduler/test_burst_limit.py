"""A burst of requests is spread over several turns of the event loop."""

import asyncio
import itertools
from collections import Counter

import pytest
from starlette.types import Message, Receive, Scope, Send

from scheduler.api.gate import Gate
from scheduler.http.burst_limit import BurstLimit
from scheduler.observability.metrics import Metrics

pytestmark = pytest.mark.anyio


class _Turns:
    """Counts the turns of the loop."""

    def __init__(self) -> None:
        self.now = 0
        self._count()

    def _count(self) -> None:
        self.now += 1
        self._next = asyncio.get_running_loop().call_soon(self._count)

    def end(self) -> None:
        self._next.cancel()


async def test_a_limited_number_begins_at_once_and_all_in_order() -> None:
    turnstile, turns = BurstLimit(4, 3), _Turns()
    began: list[tuple[int, int]] = []

    async def request(number: int) -> None:
        await turnstile.enter()
        began.append((turns.now, number))

    async with asyncio.timeout(300):
        await asyncio.gather(*(request(number) for number in range(50)))
    turns.end()

    assert [number for _, number in began] == list(range(50))
    count = Counter(turn for turn, _ in began)
    assert max(count.values()) <= 4
    assert all(later - earlier >= 3 for earlier, later in itertools.pairwise(sorted(count)))


async def test_one_request_alone_does_not_wait() -> None:
    turnstile, turns = BurstLimit(1, 1), _Turns()
    for _ in range(3):
        before = turns.now
        await turnstile.enter()
        assert turns.now == before
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    turns.end()


async def test_a_request_that_was_cancelled_takes_no_place() -> None:
    turnstile = BurstLimit(1, 1)
    first, gone, later = (asyncio.create_task(turnstile.enter()) for _ in range(3))
    await asyncio.sleep(0)
    assert first.done()
    gone.cancel()

    async with asyncio.timeout(300):
        await later
    assert gone.cancelled()
    assert not turnstile._waiting


async def test_the_gate_delays_only_work_requests() -> None:
    began: Counter[tuple[str, int]] = Counter()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        began[scope["method"], turns.now] += 1
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body"})

    async def receive() -> Message:
        raise AssertionError("nothing is read")

    async def send(_: Message) -> None:
        pass

    gate, turns = Gate(app, Metrics(), {}), _Turns()
    async with asyncio.timeout(300), asyncio.TaskGroup() as tasks:
        for method in ("POST", "GET"):
            for _ in range(100):
                tasks.create_task(gate({"type": "http", "method": method, "path": "/", "headers": []}, receive, send))
    turns.end()

    assert [count for (method, _), count in began.items() if method == "GET"] == [100]
    assert max(count for (method, _), count in began.items() if method == "POST") <= 4
    assert began.total() == 200
