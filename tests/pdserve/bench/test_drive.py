"""A load sends each request when it is due, within its concurrency limit; interrupted, it keeps finished ones."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.bench.load.drive import drive
from pdserve.bench.load.load_request import LoadRequest
from pdserve.bench.load.record import LoadRecord
from pdserve.bench.load.timeline import Timeline
from tests.examples import examples

ASK = LoadRequest("a", 1)


class Time:
    """A clock that only sleeping advances."""

    def __init__(self) -> None:
        self.now = 5.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


@examples(50)
@given(st.lists(st.integers(0, 9_000), min_size=1, max_size=20))
def test_each_request_is_sent_when_it_is_due(due_ms: list[int]) -> None:
    time, times_s = Time(), sorted(ms / 1000 for ms in due_ms)
    record = LoadRecord(len(times_s))

    async def send(number: int, request: LoadRequest, due_s: float) -> Timeline:
        return Timeline(due_s, time(), (), time())

    asyncio.run(drive([ASK] * len(times_s), times_s, send, record, clock=time, sleep=time.sleep))

    assert [line.due_s for line in record.in_order] == pytest.approx([5.0 + at_s for at_s in times_s])
    assert record.unfinished == 0
    assert record.duration_s >= times_s[-1] - 1e-9


def test_no_more_requests_are_in_flight_than_the_limit() -> None:
    under_way, peak = set[int](), [0]

    async def send(number: int, request: LoadRequest, due_s: float) -> Timeline:
        under_way.add(number)
        peak.append(len(under_way))
        for _ in range(3):
            await asyncio.sleep(0)
        under_way.remove(number)
        return Timeline(due_s, due_s)

    record, time = LoadRecord(12), Time()
    asyncio.run(drive([ASK] * 12, [0.0] * 12, send, record, clock=time, max_concurrency=4))

    assert max(peak) == 4
    assert len(record.lines) == 12


def test_finished_requests_stay_when_a_load_is_interrupted() -> None:
    async def run() -> LoadRecord:
        record, begun = LoadRecord(3), asyncio.Event()
        ended: list[int] = []

        async def send(number: int, request: LoadRequest, due_s: float) -> Timeline:
            if number:
                begun.set()
                await asyncio.Event().wait()
            return Timeline(due_s, due_s)

        def see(seen: LoadRecord) -> None:
            ended.extend(seen.lines)

        task = asyncio.create_task(drive([ASK] * 3, [0.0] * 3, send, record, clock=Time(), seen=see))
        await asyncio.wait_for(begun.wait(), 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == [0]
        return record

    record = asyncio.run(run())

    assert list(record.lines) == [0]
    assert record.unfinished == 2
    assert record.under_way == {1: 5.0, 2: 5.0}


def test_requests_waiting_for_a_slot_are_not_in_flight() -> None:
    async def run() -> LoadRecord:
        record, begun = LoadRecord(5), asyncio.Event()

        async def send(number: int, request: LoadRequest, due_s: float) -> Timeline:
            if number == 1:
                begun.set()
            await asyncio.Event().wait()
            raise AssertionError

        task = asyncio.create_task(drive([ASK] * 5, [0.0] * 5, send, record, clock=Time(), max_concurrency=2))
        await asyncio.wait_for(begun.wait(), 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return record

    assert asyncio.run(run()).under_way.keys() == {0, 1}
