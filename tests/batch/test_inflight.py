"""A busy server gets fewer requests at once, and more again as it answers."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from batch.backend import Answer
from batch.inflight import Inflight
from batch.job import BatchJob
from tests.batch.scripted import AT_ONCE, Scripted, echo, json_answer, line, read_lines, run_job, write_lines

pytestmark = pytest.mark.anyio

GOOD, FULL, WRONG = 200, 429, 400


def _answering(status: int) -> Callable[[], Awaitable[Answer]]:
    async def send() -> Answer:
        await asyncio.sleep(0)
        return json_answer({}, status)

    return send


async def _round(inflight: Inflight, status: int, count: int) -> int:
    """Send `count` requests at once; return the limit afterwards."""
    await asyncio.gather(*(inflight.run(_answering(status)) for _ in range(count)))
    return inflight.limit


@pytest.mark.parametrize("busy", [429, 503, 504, 529])
async def test_it_is_halved_once_for_all_requests_refused_together(busy: int) -> None:
    inflight = Inflight(64)

    assert [await _round(inflight, busy, inflight.limit) for _ in range(7)] == [32, 16, 8, 4, 2, 1, 1]


async def test_the_window_doubles_to_its_last_good_size_then_grows_slowly() -> None:
    inflight = Inflight(64)
    assert await _round(inflight, FULL, 64) == 32
    assert await _round(inflight, FULL, 32) == 16

    limits = [await _round(inflight, GOOD, inflight.limit) for _ in range(4)]

    assert limits == [32, 33, 34, 35], "a second cut during an outage does not show the server's capacity"


async def test_late_answers_do_not_undo_a_reduction() -> None:
    inflight, gate = Inflight(8), asyncio.Event()

    async def late() -> Answer:
        await gate.wait()
        return json_answer({})

    waiting = [asyncio.create_task(inflight.run(late)) for _ in range(6)]
    await asyncio.sleep(0)
    assert await _round(inflight, FULL, 1) == 4
    gate.set()
    await asyncio.gather(*waiting)

    assert inflight.limit == 4


async def test_a_line_refused_for_its_content_counts_as_an_answer() -> None:
    inflight = Inflight(8)
    await _round(inflight, FULL, 8)

    assert await _round(inflight, WRONG, 4) == 5


async def test_the_window_never_exceeds_the_requested_one() -> None:
    assert await _round(Inflight(4), GOOD, 100) == 4


async def test_in_flight_requests_stay_in_the_limit_despite_cancels() -> None:
    inflight, gate, out = Inflight(1), asyncio.Event(), list[int]()

    async def send(number: int) -> Answer:
        out.append(number)
        await gate.wait()
        return json_answer({})

    tasks = [asyncio.create_task(inflight.run(partial(send, number))) for number in range(4)]
    await asyncio.sleep(0)
    assert out == [0]
    tasks[0].cancel()  # its place goes to the next one, which is cancelled before it can take it
    await asyncio.sleep(0)
    tasks[1].cancel()
    gate.set()
    ended = await asyncio.gather(*tasks, return_exceptions=True)

    assert [isinstance(one, asyncio.CancelledError) for one in ended] == [True, True, False, False]
    assert out[-2:] == [2, 3]


class _Small(Scripted):
    """A server that refuses all requests above `room` at once, and counts them."""

    def __init__(self, room: int) -> None:
        super().__init__(self._by_room)
        self.turned_away = 0
        self._room = room

    def _by_room(self, n: int, times: int) -> Answer:
        if self.now >= self._room:
            self.turned_away += 1
            return json_answer({"error": {"message": "the queue is full"}}, FULL)
        return echo(n)


async def test_a_small_server_is_not_flooded_by_retries(job: BatchJob) -> None:
    write_lines(job.input_path, map(line, range(400)))
    small = _Small(room=8)

    progress = await run_job(BatchJob(job.input_path, job.output_path, max_inflight=64, retries=AT_ONCE), small)

    assert (progress.done, progress.errors) == (400, 0)
    assert len(read_lines(job.output_path)) == 400
    assert small.turned_away < 150
    assert progress.at_once is not None
    assert progress.at_once < 64
