"""Reservations wait for prefill, prompts for blocks, prefill for its receivers; a slow link slows its own requests."""

import asyncio
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from simulation.instance import SimulatedInstance
from simulation.prompt import SimulatedPrompt
from simulation.session import SimulatedSession
from tests.scheduler.fake_cluster import Answer, FakeCluster, collect, expected, request
from tests.scheduler.virtual_time import until, virtual
from wire.description import InstanceDescription
from wire.errors import DeadlineExceeded
from wire.messages import Command, Prefill, Reserve

FIVE_BLOCKS = tuple(range(80))


class Watched(SimulatedInstance):
    """Calls `on_reserve` before it handles a reservation."""

    on_reserve: Callable[[Reserve], None] | None = None

    def _handle(self, session: SimulatedSession, command: Command) -> None:
        if isinstance(command, Reserve) and self.on_reserve is not None:
            self.on_reserve(command)
        super()._handle(session, command)


def reserved(instance: SimulatedInstance) -> list[SimulatedPrompt]:
    """Return its prompts whose KV has not arrived yet."""
    return [prompt for prompt in instance.prompts.values() if prompt.stage == "reserved"]


@virtual
async def test_reservations_wait_until_prefill_can_start_in_its_next_step() -> None:
    cluster = FakeCluster("PD", num_blocks=1000, max_num_seqs=100)
    cluster.kind = Watched
    async with cluster.serving():
        prefill, decode = cluster.instances
        uncomputed: list[int] = []
        assert isinstance(decode, Watched)
        decode.on_reserve = lambda _: uncomputed.append(prefill.load().uncomputed_tokens)
        prompts = [tuple(range(5 + 13 * i % 97)) for i in range(40)]
        async with asyncio.TaskGroup() as tasks:
            for prompt in prompts:
                tasks.create_task(collect(cluster.control.dispatch, request(prompt)))

        assert len(uncomputed) == 40
        assert max(uncomputed) <= 32  # a chunk: the step that is about to finish takes all of it


@virtual
async def test_reservations_wait_until_prefill_has_the_blocks() -> None:
    cluster = FakeCluster("PD", prefill_chunk_size=4096, max_num_seqs=100)
    cluster.kind = Watched
    cluster.descriptions[0] = dataclasses.replace(cluster.descriptions[0], num_blocks=8)
    async with cluster.serving():
        prefill, decode = cluster.instances
        prefill.behaviour.send_s = 0.3
        room: list[int] = []
        assert isinstance(decode, Watched)
        decode.on_reserve = lambda _: room.append(8 - 5 - sum(p.blocks for p in reserved(decode)))
        began = asyncio.get_running_loop().time()
        readers = [asyncio.create_task(collect(cluster.control.dispatch, request(FIVE_BLOCKS))) for _ in "abc"]
        await asyncio.wait(readers)

        assert len(room) == 3
        assert min(room) >= 0
        assert asyncio.get_running_loop().time() - began < 1.5  # each starts as the one before is handed off


class SlowLink(SimulatedInstance):
    """A prefill instance that takes `slow_s` seconds more to send KV to some instances."""

    def __init__(self, description: InstanceDescription, peers: dict[str, SimulatedInstance]) -> None:
        super().__init__(description, peers)
        self.slow_s: dict[str, float] = {}
        self._delayed: set[str] = set()

    def _hand_off(self, prompt: SimulatedPrompt) -> None:
        assert prompt.ticket is not None
        slow_s = self.slow_s.get(prompt.ticket.instance_id, 0.0)
        if slow_s == 0 or prompt.prompt_id in self._delayed:
            super()._hand_off(prompt)
        else:
            self._delayed.add(prompt.prompt_id)
            asyncio.get_running_loop().call_later(slow_s, self._hand_off, prompt)


@dataclass(frozen=True)
class Paces:
    """Durations of requests by (prefill, decode) instance, and the maximum that waited at once for the first link."""

    by_pair: dict[tuple[str | None, str | None], list[float]]
    max_held: int


async def paces(slow_s: float) -> Paces:
    """Run 300 requests on 2 x 2 instances whose first link takes `slow_s` longer."""
    cluster = FakeCluster("PPDD", max_num_seqs=32)
    cluster.kind = SlowLink
    took: dict[tuple[str | None, str | None], list[float]] = {}
    loop, max_held = asyncio.get_running_loop(), 0

    async def ask(prompt: tuple[int, ...]) -> None:
        began = loop.time()
        answer = await collect(cluster.control.dispatch, request(prompt, max_tokens=50, limits_s=(99.0, 99.0)))
        done = answer.done[0]
        assert answer.tokens[0, 0] == expected(prompt, 50)
        took.setdefault((done.prefill_instance, done.decode_instance), []).append(loop.time() - began)

    async with cluster.serving():
        first = cluster.instances[0]
        assert isinstance(first, SlowLink)
        first.slow_s[cluster.instances[2].description.instance_id] = slow_s
        async with asyncio.TaskGroup() as tasks:
            for number in range(300):
                tasks.create_task(ask(tuple(range(number % 40 + 1))))
                await asyncio.sleep(0.01)
                held = [p for p in first.prompts.values() if p.stage == "sending" and p.ticket is not None]
                max_held = max(max_held, sum(p.ticket.instance_id == "decode-2" for p in held if p.ticket))
    return Paces(took, max_held)


@virtual
async def test_a_slow_link_slows_its_own_requests_only() -> None:
    even, uneven = await paces(0.0), await paces(20.0)
    slow = ("prefill-0", "decode-2")

    assert len(even.by_pair) == len(uneven.by_pair) == 4
    assert min(uneven.by_pair[slow]) > 20.0
    before = max(seconds for pair, times in even.by_pair.items() for seconds in times if pair != slow)
    after = max(seconds for pair, times in uneven.by_pair.items() for seconds in times if pair != slow)
    assert after <= 2 * before
    assert uneven.max_held <= 8  # a quarter of decode's sequences, and few enough tokens


@virtual
async def test_prefill_bounds_its_finished_kv_and_continues_when_it_is_gone() -> None:
    cluster = FakeCluster("PD", prefill_chunk_size=100, max_num_seqs=100)
    cluster.descriptions[1] = dataclasses.replace(cluster.descriptions[1], num_blocks=1000)
    async with cluster.serving():
        prefill = cluster.instances[0]
        prefill.behaviour.send_s = 2.0
        peak, readers = 0, []
        for _ in range(30):
            readers.append(asyncio.create_task(collect(cluster.control.dispatch, request(FIVE_BLOCKS))))
        while not all(reader.done() for reader in readers):
            peak = max(peak, sum(prompt.blocks for prompt in prefill.prompts.values() if prompt.stage == "sending"))
            assert prefill.blocks_used <= 64
            await asyncio.sleep(0.01)

        assert all(reader.result().finishes for reader in readers)
        assert 32 <= peak <= 45  # half the pool, and the two prompts in progress when it was reached


@virtual
async def test_a_prefill_refusal_is_retried_and_frees_the_reservation() -> None:
    cluster = FakeCluster("PD")
    cluster.kind = RefusesPrefill
    async with cluster.serving():
        refusing = cluster.instances[0]
        assert isinstance(refusing, RefusesPrefill)
        refusing.refusals = 2

        answer = await collect(cluster.control.dispatch, request(FIVE_BLOCKS))

        assert answer.tokens[0, 0] == expected(FIVE_BLOCKS, 4)
        assert cluster.control.dispatch.ledger.retried_prompts == 0
        assert cluster.blocks_used == [0, 0]


class RefusesPrefill(SimulatedInstance):
    """Refuses its next `refusals` prompts because it holds too much KV."""

    refusals = 0

    def _handle(self, session: SimulatedSession, command: Command) -> None:
        if isinstance(command, Prefill) and self.refusals:
            self.refusals -= 1
            self._refuse(session, command.prompt.prompt_id, "NoCapacity", "2 finished prompts wait for their receivers")
        else:
            super()._handle(session, command)


@virtual
async def test_a_long_prompt_is_not_starved_by_short_ones_that_follow() -> None:
    async with FakeCluster("PD", prefill_chunk_size=1024, max_num_seqs=100).serving() as cluster:
        dispatch, loop = cluster.control.dispatch, asyncio.get_running_loop()
        cluster.instances[1].behaviour.step_s = 0.05
        shorts: list[asyncio.Task[Answer]] = []

        async def send_shorts() -> None:
            for number in range(400):
                shorts.append(asyncio.create_task(collect(dispatch, request((number,), max_tokens=20))))
                await asyncio.sleep(0.02)

        sending = asyncio.create_task(send_shorts())
        await until(lambda: cluster.blocks_used[1] > 40)  # as many arrive as leave: it stays as full as this
        long = tuple(range(50 * 16))
        began = loop.time()
        await collect(dispatch, request(long))
        took = loop.time() - began
        await sending
        await asyncio.wait(shorts)

        assert took < 5.0
        assert all(short.result().finishes for short in shorts)


@virtual
async def test_a_wait_for_blocks_ends_at_the_requests_limit_with_the_values() -> None:
    async with FakeCluster("PD", max_num_seqs=100, prefill_chunk_size=1024).serving() as cluster:
        dispatch = cluster.control.dispatch
        cluster.instances[1].behaviour.step_s = 0.5
        filling = [
            asyncio.create_task(collect(dispatch, request(tuple(range(320)), max_tokens=300, limits_s=(99, 99))))
            for _ in range(3)
        ]
        await until(lambda: cluster.blocks_used == [0, 60])

        words = (
            r"no first token within 3 s, waiting in the queue: decode-0 has 4 of 64 KV blocks free, but 5 are needed"
        )
        with pytest.raises(DeadlineExceeded, match=words):
            await collect(dispatch, request(FIVE_BLOCKS, limits_s=(3.0, 3.0)))
        assert sum(isinstance(command, Reserve) for command in cluster.instances[1].commands) == 3
        for task in filling:
            task.cancel()
