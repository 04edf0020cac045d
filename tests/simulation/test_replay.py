"""A simulated cluster takes the time that its costs say, on the paths that placement chooses."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean, pvariance

import pytest

from scheduler.request import GenerationRequest
from scheduler.request_class import RequestClass
from simulation.cluster import Shape, SimulatedCluster
from simulation.replay import Served, simulate
from simulation.trace import TraceRequest, poisson, prompt_of
from tests.scheduler.virtual_time import virtual
from wire.errors import Overloaded
from wire.step_cost import StepCost
from wire.types import Role, SamplingParams

P, D, C = Role.PREFILL, Role.DECODE, Role.COMBINED
COST = StepCost(base_s=0.013, sequence_s=0.0009, token_s=0.0014)
"""Of the default model on one slow core: 358 ms for a prompt of 256 tokens, 14 ms for a step of one stream."""


def test_one_request_takes_what_its_steps_cost() -> None:
    (served,) = simulate(Shape([P, D], COST, send_s=0.004), [TraceRequest(2.0, 256, 64)])

    assert served.path == "handoff"
    assert served.num_tokens == 64
    assert served.ttft_s == pytest.approx(0.013 + 256 * 0.0014, abs=1e-6)
    assert served.longest_gap_s == pytest.approx(0.004 + 0.0139, abs=1e-6)
    assert served.last - served.first == pytest.approx(0.004 + 63 * 0.0139, abs=1e-6)


def test_a_long_prompt_is_computed_in_chunks_within_the_limit_of_gaps() -> None:
    stream, long = simulate(Shape([C], COST, gap_limit_s=0.1), [TraceRequest(0.0, 64, 100), TraceRequest(0.3, 2048, 2)])

    assert 0.05 < stream.longest_gap_s <= 0.1
    assert long.ttft_s > 2048 * 0.0014


@pytest.mark.parametrize("roles", [[C], [P, D]], ids=["combined", "pair"])
@pytest.mark.parametrize(
    ("limits", "shortest_s"), [((None,), 0.1), ((0.05,), 0.05), ((0.5,), 0.5), ((0.05, 0.5), 0.05), ((None, 0.5), 0.1)]
)
def test_chunks_keep_the_shortest_limit_of_the_streams_beside_them(
    roles: list[Role], limits: tuple[float | None, ...], shortest_s: float
) -> None:
    """Beside streams of these classes, the first one's limit the shortest; without one `--gap-limit` counts."""
    streams = [TraceRequest(3.0, 64, 300, request_class=RequestClass("", None, limit)) for limit in limits]
    long = [TraceRequest(4.5, 2048, 2)] * 3
    shape = Shape(roles, COST, gap_limit_s=0.1, compare_paths=True)
    _, served, *_, last = simulate(shape, [TraceRequest(0.0, 64, 30), *streams, *long])  # the first measures steps

    assert shortest_s / 2 < served.longest_gap_s <= 1.02 * shortest_s  # a chunk may be a token too long
    assert last.ttft_s > 2048 * 0.0014


def test_a_full_batch_is_one_step_for_all() -> None:
    served = simulate(Shape([C], COST, prefill_chunk_size=2048), [TraceRequest(0.0, 16, 50)] * 8)

    steps_s = [0.013 + width * 0.0009 for width in range(1, 9)]
    assert all(one.longest_gap_s < steps_s[-1] + 8 * 16 * 0.0014 for one in served)
    assert max(one.tpot_s for one in served) == pytest.approx(steps_s[-1], rel=0.2)


def _rate(served: Sequence[Served]) -> float:
    return sum(one.num_tokens for one in served) / (max(one.last for one in served) - served[0].arrived)


def _late(served: Sequence[Served]) -> float:
    return sorted(one.ttft_s for one in served)[int(0.95 * len(served))]


_BURST = [*([TraceRequest(0.0, 64, 256)] * 8), *([TraceRequest(1.0, 256, 8)] * 32)]


@pytest.mark.combinations(1)
@pytest.mark.parametrize("gap_limit_s", [0.1, 0.03])
@pytest.mark.parametrize(
    "trace",
    [
        poisson(32, 0, 256, 64, 1),
        poisson(60, 1.7, 256, 64, 1),
        poisson(60, 4.0, 256, 64, 2),
        poisson(40, 0.7, 1024, 16, 2),
        _BURST,
    ],
    ids=["32 at once", "Poisson", "overload", "long prompts", "burst on streams"],
)
def test_path_auto_is_about_as_good_as_colocated(trace: list[TraceRequest], gap_limit_s: float) -> None:
    pair = simulate(Shape([P, D], COST, gap_limit_s=gap_limit_s, compare_paths=True), trace)
    colocated = simulate(Shape([C, C], COST, gap_limit_s=gap_limit_s), trace)

    assert _rate(pair) >= 0.92 * _rate(colocated)
    assert _late(pair) <= 1.1 * _late(colocated)


@pytest.mark.parametrize(("caches_prefixes", "saved"), [(True, 512), (False, 0)])
def test_a_cached_prefix_is_not_computed_again(caches_prefixes: bool, saved: int) -> None:
    first, second = simulate(
        Shape([P, D], COST, prefill_chunk_size=2048, caches_prefixes=caches_prefixes),
        [TraceRequest(0.0, 1000, 4, (1, 2)), TraceRequest(5.0, 1000, 4, (1, 3))],
    )

    assert first.ttft_s - second.ttft_s == pytest.approx(saved * COST.token_s, abs=1e-3)


def test_chats_stay_where_their_prefixes_are_on_many_instances() -> None:
    """Each turn's prompt is that of the turn before and 512 tokens; it follows 10 s later."""
    begun_s = random.Random(4)
    chats = [
        TraceRequest(at_s + 10.0 * turn, 512 * turn, 32, (0, *(5 * chat + at for at in range(1, turn))))
        for chat, at_s in enumerate(begun_s.uniform(0.0, 10.0) for _ in range(96))
        for turn in range(2, 7)
    ]
    chats.sort(key=lambda one: one.arrival_s)

    assert _late(simulate(Shape([P] * 12 + [D] * 12, COST), chats)) < 3.0


def test_a_prompt_that_no_pool_can_take_is_refused_and_no_other_is() -> None:
    long, short = simulate(Shape([P, D], COST, num_blocks=64), [TraceRequest(0.0, 4096, 4), TraceRequest(0.0, 64, 4)])

    assert (long.num_tokens, long.num_tries) == (0, 1)
    assert short.num_tokens == 4


def test_a_limit_of_the_first_token_keeps_it_under_overload() -> None:
    trace = poisson(200, 6.0, 256, 64, 1)  # 1.5 times what the pair can serve
    limited = simulate(Shape([P, D], COST, compare_paths=True, ttft_limit_s=2.0), trace)
    free = simulate(Shape([P, D], COST, compare_paths=True), trace)

    refused = [one for one in limited if not one.num_tokens]
    served = [one for one in limited if one.num_tokens]
    assert 0 < len(refused) < 100
    assert 1.5 * sum(one.num_tries for one in limited) / len(limited) < 1.7, "what clients send, of what can be served"
    assert max(one.ttft_s for one in served if one.num_tries == 1) <= 1.5 * 2.0
    assert _late(free) > 5 * 2.0
    assert sum(one.num_tokens for one in served) == 64 * len(served)


@virtual
async def test_a_late_request_is_refused_at_once_with_when_to_retry() -> None:
    cluster, loop = (
        SimulatedCluster(Shape([P, D], COST, compare_paths=True, ttft_limit_s=2.0)),
        asyncio.get_running_loop(),
    )
    params, tasks = SamplingParams(max_tokens=16), list[asyncio.Task[float]]()

    async def send(num_tokens: int) -> float:
        served = Served(loop.time())
        prompts = (prompt_of(len(tasks), TraceRequest(0.0, num_tokens, 16)),)
        await cluster.control.dispatch.run(GenerationRequest(str(len(tasks)), prompts, params, 60.0, 60.0), served)
        return served.ttft_s

    async with cluster.serving():
        await send(256)  # measures steps
        refused_at = loop.time()
        while not tasks or not tasks[-1].done():
            tasks.append(asyncio.create_task(send(256)))
            await asyncio.sleep(0)
        with pytest.raises(Overloaded, match=r"is expected after 2\.\d s \(limit 2 s, --ttft-limit\)") as refused:
            await tasks.pop()
        assert loop.time() == refused_at
        await asyncio.sleep(refused.value.retry_after_s)
        assert refused.value.retry_after_s == 1
        assert not refused.value.is_final
        assert await send(256) <= 2.0
        assert max(await asyncio.gather(*tasks)) <= 2.0 * 1.1
        refused_at = loop.time()
        with pytest.raises(Overloaded, match=r"on an idle cluster \(limit 2 s, --ttft-limit\)") as never:
            await send(4096)
        assert (never.value.is_final, loop.time()) == (True, refused_at)


@pytest.mark.parametrize(
    ("limit_s", "of_class_s", "num_tokens"), [(1.0, None, 0), (0.0, 1.0, 0), (60.0, 1.0, 0), (1.0, 60.0, 4)]
)
def test_a_prompt_that_never_meets_the_limit_is_not_tried_again(
    limit_s: float, of_class_s: float | None, num_tokens: int
) -> None:
    late = TraceRequest(2.0, 4096, 4, request_class=RequestClass("", of_class_s))
    first, late_served = simulate(Shape([P, D], COST, ttft_limit_s=limit_s), [TraceRequest(0.0, 64, 4), late])

    assert first.num_tokens == 4
    assert (late_served.num_tokens, late_served.num_tries) == (num_tokens, 1)


def test_shares_of_paths_are_steady_with_loads_half_a_second_old() -> None:
    steps = (poisson(150, 1.5, 256, 64, 3), poisson(350, 7.0, 256, 64, 4))  # a step of load after 100 s
    trace = [*steps[0], *(TraceRequest(100.0 + r.arrival_s, 256, 64) for r in steps[1])]
    served = simulate(Shape([P, P, D, D], COST, compare_paths=True, load_lag_s=0.5), trace)

    windows = (served[50:150], served[220:360], served[360:500])  # the second begins 10 s after the step
    shares = [sum(one.path == "local on prefill" for one in window) / len(window) for window in windows]
    assert max(shares) - min(shares) < 0.1
    assert abs(shares[1] - shares[2]) < 0.05


def test_three_schedulers_with_old_loads_settle_after_a_step_of_load() -> None:
    """None of them sees what the others placed in the last half second."""
    before, after = poisson(200, 1.5, 256, 64, 3), poisson(840, 4.0, 256, 64, 4)
    trace = [*before, *(replace(one, arrival_s=before[-1].arrival_s + one.arrival_s) for one in after)]
    shape = Shape([P, P, D, D], COST, compare_paths=True, load_lag_s=0.5, num_schedulers=3)

    served = [one.path == "local on prefill" for one in simulate(shape, trace)[240:]]  # from 10 s after the step
    assert abs(mean(served[:400]) - mean(served[400:])) < 0.05
    for size, most in ((20, 1.0), (4, 1.5)):  # of 5 s and of 1 s
        counts = [sum(served[i : i + size]) for i in range(0, 800, size)]
        by_chance = size * mean(served) * (1 - mean(served))
        assert pvariance(counts) < most * by_chance, "the path goes to and fro: ties are to be broken at random"


def _last_roles(roles: Sequence[Role], *phases: tuple[int, float, int, int]) -> tuple[list[Served], list[Role]]:
    """Serve phases of (requests, rate, prompt tokens, output tokens) with `--roles auto`; return the last roles too."""
    trace: list[TraceRequest] = []
    for phase in phases:
        begun = trace[-1].arrival_s if trace else 0.0
        trace += [replace(one, arrival_s=begun + one.arrival_s) for one in poisson(*phase, seed=len(trace))]
    cluster: list[SimulatedCluster] = []
    served = simulate(Shape(roles, COST, follow_load=True), trace, made=cluster.append)
    return served, [member.role for member in cluster[0].control.registry.members]


def test_roles_follow_long_prompts_and_then_long_answers() -> None:
    long_prompts, long_answers = (240, 2.0, 1000, 16), (160, 2.0, 64, 400)
    served, roles = _last_roles([P, D, D, D], long_prompts)
    fixed = simulate(Shape([P, D, D, D], COST), poisson(*long_prompts, seed=0))

    assert roles.count(P) == 3
    assert _late(served) < _late(fixed) / 4
    assert sorted(one.ttft_s for one in served[120:])[60] < 4.0 < 60.0 < sorted(one.ttft_s for one in fixed[120:])[60]
    _, roles = _last_roles([P, D, D, D], long_prompts, long_answers)
    assert roles.count(D) >= 2


@pytest.mark.parametrize(
    ("roles", "phase"),
    [
        ([P, P, D, D], (600, 2.0, 256, 64)),
        ([P, D], (100, 2.0, 1000, 16)),
        ([P, D, C], (100, 2.0, 256, 64)),
        ([P, P, D, D], (40, 0.1, 256, 64)),
    ],
    ids=["a steady load", "the last of a role", "one of each", "hardly any load"],
)
def test_roles_stay(roles: list[Role], phase: tuple[int, float, int, int]) -> None:
    assert _last_roles(roles, phase)[1] == roles
