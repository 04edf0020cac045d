"""Each load is sent as its name says, and its figures come from the right requests."""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from pdserve.bench.load.load_request import LoadRequest
from pdserve.bench.load.random_requests import RequestSizes
from pdserve.bench.load.timeline import RequestFailure, Timeline
from pdserve.bench.pd.loads import Load, Sent, all_loads, send_load
from pdserve.bench.pd.outcome import outcome
from pdserve.bench.pd.request_routes import nothing
from tests.pdserve.bench.timelines import made


class Counting:
    """A way that answers after a few turns of the loop, and records how many requests were in flight at each start."""

    def __init__(self, failing: int = 0) -> None:
        self.requests: list[LoadRequest] = []
        self.concurrent: list[int] = []
        self._under_way, self._failing = 0, failing

    async def send(
        self, request: LoadRequest, due_s: float | None = None, *, on_first: Callable[[], None] = nothing
    ) -> Timeline:
        self.requests.append(request)
        self.concurrent.append(self._under_way)
        self._under_way += 1
        fails = len(self.requests) <= self._failing
        try:
            for turn in range(request.max_tokens):
                await asyncio.sleep(0)
                if turn == 1 and not fails:
                    on_first()
        finally:
            self._under_way -= 1
        line = made(0.0, [0.1] * request.max_tokens, input_len=len(request.prompt))
        return replace(line, failure=RequestFailure("lost", "")) if fails else line


def send(load: Load, route: Counting, seed: int = 0) -> Sent:
    return asyncio.run(send_load(load, route, 1000, seed, lambda: 0.0))


def test_one_at_a_time_never_has_two_in_flight_and_a_burst_has_all() -> None:
    alone, concurrently = Counting(), Counting()

    send(Load("one", 4, RequestSizes(8, 3), at_once=1), alone)
    send(Load("all", 4, RequestSizes(8, 3), at_once=4), concurrently)

    assert alone.concurrent == [0, 0, 0, 0]
    assert concurrently.concurrent == [0, 1, 2, 3]


def test_a_burst_starts_after_every_stream_has_begun() -> None:
    route = Counting()
    load = Load("gap", 3, RequestSizes(8, 2), streams=2, stream_shape=RequestSizes(4, 40))

    found = send(load, route)

    assert [request.max_tokens for request in route.requests] == [40, 40, 2, 2, 2]
    assert route.concurrent == [0, 1, 2, 3, 4]
    assert [line.output_len for line in found.watched] == [40, 40]
    assert len(found.record.lines) == 5


def test_each_turn_of_a_chat_repeats_the_chat_so_far_and_adds_to_it() -> None:
    route = Counting()

    found = send(Load("chats", 2, RequestSizes(8, 3, prefix_len=4), turns=3), route)

    lengths = [len(line.prompt) for line in route.requests]
    assert sorted(lengths) == [12, 12, 23, 23, 34, 34]  # the prefix of all, then 3 for an answer and 8 new ones
    assert len({request.prompt[:4] for request in route.requests}) == 1
    for chat in {request.prompt[:12] for request in route.requests}:
        turns = sorted((one.prompt for one in route.requests if one.prompt[:12] == chat), key=len)
        assert [later[: len(before)] for before, later in itertools.pairwise(turns)] == turns[:-1]
    assert max(route.concurrent) == 1  # a chat never has two turns in flight
    assert [line.output_len for line in found.record.in_order] == [3] * 6


def test_failed_streams_are_not_waited_for() -> None:
    found = send(Load("gap", 3, RequestSizes(8, 2), streams=2, stream_shape=RequestSizes(4, 40)), Counting(failing=2))

    assert [line.failure is not None for line in found.record.in_order] == [True, True, False, False, False]


def test_no_load_reuses_cached_prompts_of_another() -> None:
    begun: list[tuple[int, ...]] = []
    for name, shape in (("a", RequestSizes(64, 2)), ("b", RequestSizes(64, 2)), ("c", RequestSizes(128, 2))):
        route = Counting()
        send(Load(name, 4, shape, at_once=1), route)
        begun.extend(tuple(request.prompt[:16]) for request in route.requests)  # type: ignore[arg-type]

    assert len(set(begun)) == 12


def test_a_seed_repeats_a_load() -> None:
    first, second, other = Counting(), Counting(), Counting()
    load = Load("one", 4, RequestSizes(8, 3), at_once=1)
    for route, seed in ((first, 1), (second, 1), (other, 2)):
        send(load, route, seed)

    assert first.requests == second.requests != other.requests


@pytest.mark.parametrize("quick", [False, True])
def test_quick_loads_fit_a_small_model(quick: bool) -> None:
    loads = all_loads(quick=quick)

    assert [load.streams > 0 for load in loads].count(True) == 1
    assert [load.turns > 1 for load in loads].count(True) == 1
    assert max(load.longest for load in loads) <= (128 if quick else 2048)
    assert all(load.requests == load.at_once for load in loads if load.at_once not in (None, 1))


def test_figures_are_the_bursts_ttft_and_the_streams_gaps() -> None:
    load = Load("gap", 2, RequestSizes(8, 2), streams=1, stream_shape=RequestSizes(4, 40))
    stream = made(0.0, [0.5, 0.1, 0.9], output_len=3)
    burst = [made(0.0, [1.0, 5.0], output_len=2), made(0.0, [3.0], output_len=1)]
    found = send(load, Counting())
    found.record.lines = dict(enumerate([stream, *burst]))
    found.record.ended_s = 6.0

    figures = outcome("P/D", load, Sent(found.record, [stream]), None, 0.0).figures

    assert figures["ttft_p50_ms"] == pytest.approx(2000)
    assert figures["ttft_p95_ms"] == pytest.approx(2900)
    assert figures["tpot_p50_ms"] == pytest.approx(500)
    assert figures["longest_gap_p99_ms"] == pytest.approx(900)
    assert figures["output_tokens_per_s"] == pytest.approx(1.0)
