"""The loads that compare P/D with colocated instances, and how each is sent."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdserve.bench.load.arrivals import arrival_times
from pdserve.bench.load.drive import drive
from pdserve.bench.load.load_request import LoadRequest
from pdserve.bench.load.random_requests import RequestSizes, make_random_requests
from pdserve.bench.load.record import LoadRecord
from pdserve.bench.load.timeline import Timeline
from pdserve.bench.pd.request_routes import RequestRoute, nothing


@dataclass(frozen=True, slots=True)
class Load:
    """Random requests of one shape: at `rate` per second if given, else `at_once` in parallel.

    With `streams`, requests of `stream_shape` are running when the others arrive at once: only the gaps of the running
    ones count. With `turns`, each request begins a chat; each later prompt is the whole chat so far and the new
    message's tokens.
    """

    name: str
    requests: int
    shape: RequestSizes
    at_once: int | None = None
    rate: float | None = None
    streams: int = 0
    stream_shape: RequestSizes | None = None
    turns: int = 1

    @property
    def longest(self) -> int:
        """The tokens of its longest prompt and answer together."""
        return self.turns * max(shape.longest for shape in (self.shape, self.stream_shape) if shape is not None)


WARM_UP = Load("warm-up", 4, RequestSizes(64, 8), at_once=2)


@dataclass(frozen=True, slots=True)
class Sent:
    """The results of a load: all requests, and the `watched` ones, whose gaps are measured."""

    record: LoadRecord
    watched: Sequence[Timeline]


def all_loads(*, quick: bool) -> tuple[Load, ...]:
    """Return the loads, which include a burst on running streams; `quick`: smaller ones."""
    if quick:
        short, stream = RequestSizes(32, 8), RequestSizes(16, 48)
        return (
            Load("one at a time, 32/8", 3, short, at_once=1),
            Load("8 at once, 32/8", 8, short, at_once=8),
            Load("Poisson 8/s, 8 x 32/8", 8, short, rate=8.0),
            Load("2 streams, burst of 8 x 32", 8, short, streams=2, stream_shape=stream),
            Load("2 chats of 2 turns, 32/8", 2, short, turns=2),
        )
    middle = RequestSizes(256, 64)
    return (
        Load("one at a time, 512/64", 10, RequestSizes(512, 64), at_once=1),
        Load("32 at once, 256/64", 32, middle, at_once=32),
        Load("Poisson 1/s, 25 x 256/64", 25, middle, rate=1.0),
        Load("Poisson 3/s, 40 x 256/64", 40, middle, rate=3.0),
        Load("8 streams, burst of 32 x 256", 32, RequestSizes(256, 8), streams=8, stream_shape=RequestSizes(64, 256)),
        Load("8 chats of 5 turns, 96/32", 8, RequestSizes(96, 32, prefix_len=128), turns=5),
        Load("Poisson 0.8/s, 16 x 1024/16", 16, RequestSizes(1024, 16), rate=0.8),
    )


async def send_load(load: Load, route: RequestRoute, vocabulary: int, seed: int, clock: Callable[[], float]) -> Sent:
    """Send a load and return the results. The seed determines the load; no two loads share a prompt."""
    numbers = random.Random(f"{seed} {load.name}")  # else one load could send prompts that another has cached
    requests = make_random_requests(load.requests, load.shape, numbers, vocabulary=vocabulary)
    if load.stream_shape is not None:
        streams = make_random_requests(load.streams, load.stream_shape, numbers, vocabulary=vocabulary)
        return await _burst_on_streams(streams, requests, route, clock)
    if load.turns > 1:
        return await _chats(load, requests, numbers, vocabulary, route, clock)
    times_s = [0.0] * len(requests) if load.rate is None else arrival_times(len(requests), load.rate, 1.0, numbers)

    async def send(number: int, request: LoadRequest, due_s: float) -> Timeline:
        return await route.send(request, due_s)

    record = LoadRecord(len(requests))
    await drive(requests, times_s, send, record, clock=clock, max_concurrency=load.at_once)
    return Sent(record, record.in_order)


async def _burst_on_streams(
    streams: Sequence[LoadRequest], requests: Sequence[LoadRequest], route: RequestRoute, clock: Callable[[], float]
) -> Sent:
    record = LoadRecord(len(streams) + len(requests))

    async def one(number: int, request: LoadRequest, begun: asyncio.Event | None = None) -> None:
        try:
            line = await route.send(request, on_first=nothing if begun is None else begun.set)
        finally:
            if begun is not None:
                begun.set()  # also if the request failed
        record.add(number, line, clock())

    begun = [asyncio.Event() for _ in streams]
    record.begin(clock())
    async with asyncio.TaskGroup() as tasks:
        for number, request in enumerate(streams):
            tasks.create_task(one(number, request, begun[number]))
        await asyncio.gather(*(each.wait() for each in begun))
        for number, request in enumerate(requests, len(streams)):
            tasks.create_task(one(number, request))
    return Sent(record, record.in_order[: len(streams)])


async def _chats(
    load: Load, firsts: Sequence[LoadRequest], numbers: random.Random, vocabulary: int, route: RequestRoute,
    clock: Callable[[], float],
) -> Sent:  # fmt: skip
    """Let each chat send its turns one after the other; in later prompts, random ids stand for the earlier answers."""
    shape = load.shape
    added = RequestSizes(shape.output_len + shape.input_len, shape.output_len)
    later = [make_random_requests(load.turns - 1, added, numbers, vocabulary=vocabulary) for _ in firsts]
    record = LoadRecord(len(firsts) * load.turns)

    async def chat(number: int, first: LoadRequest) -> None:
        prompt: tuple[int, ...] = ()
        for turn, request in enumerate((first, *later[number])):
            assert isinstance(request.prompt, tuple)
            prompt += request.prompt
            line = await route.send(LoadRequest(prompt, request.max_tokens))
            record.add(number * load.turns + turn, line, clock())

    record.begin(clock())
    async with asyncio.TaskGroup() as tasks:
        for number, first in enumerate(firsts):
            tasks.create_task(chat(number, first))
    return Sent(record, record.in_order)
