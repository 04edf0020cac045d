"""A starved process is slow, not dead: the limit of silence depends on how long each process could not run."""

import asyncio
from dataclasses import dataclass

import pytest

from pdserve import inner_app
from scheduler.limits import ControlLimits
from scheduler.membership.member import MemberState
from scheduler.serving import report
from scheduler.starvation import MAX_SLOWNESS, Slowness, extended_timeout
from tests.scheduler.fake_cluster import FakeCluster, Running, collect, expected, request
from tests.scheduler.virtual_time import until, virtual

PROMPT = (1, 2, 3)


@dataclass
class Starved:
    """Seconds in which this process was kept from running: none, or all of them since `since`."""

    since: float | None = None

    def __call__(self) -> float:
        return 0.0 if self.since is None else asyncio.get_running_loop().time() - self.since


def _now() -> float:
    return asyncio.get_running_loop().time()


def _states(cluster: FakeCluster) -> list[MemberState]:
    return [member.state for member in cluster.control.registry.members]


@pytest.mark.parametrize(
    ("starved_share", "silent_s", "state"),
    [
        (0.0, 2.0, MemberState.LIVING), (0.0, 4.0, MemberState.SUSPECT), (0.0, 7.5, MemberState.LOST),
        (0.9, 8.0, MemberState.LIVING), (0.9, 15.0, MemberState.SUSPECT), (0.9, 22.0, MemberState.LOST),
    ],
)  # fmt: skip
@virtual
async def test_silence_is_judged_by_how_starved_the_instance_is(
    starved_share: float, silent_s: float, state: MemberState
) -> None:
    async with FakeCluster("PD").serving() as cluster:
        cluster.instances[1].behaviour.starved_share = starved_share
        await asyncio.sleep(5.0)
        cluster.network.freeze(cluster.expected[1].address)
        await asyncio.sleep(silent_s)

        assert _states(cluster) == [MemberState.LIVING, state]


@virtual
async def test_a_starved_scheduler_suspects_no_instance() -> None:
    starved = Starved()
    async with FakeCluster("PD", limits=ControlLimits(starved=starved)).serving() as cluster:
        starved.since = _now()
        cluster.network.freeze(cluster.expected[1].address)
        await asyncio.sleep(30.0)

        assert _states(cluster) == [MemberState.LIVING, MemberState.LIVING]


@virtual
async def test_a_suspect_instance_keeps_its_stream_and_gets_no_new_work() -> None:
    async with FakeCluster("PDD").serving() as cluster:
        first = Running(cluster.control.dispatch, request(PROMPT, max_tokens=8, limits_s=(60.0, 60.0)))
        await until(lambda: any(prompt.stage == "decoding" for prompt in cluster.instances[1].prompts.values()))
        cluster.network.freeze(cluster.expected[1].address)
        await until(lambda: _states(cluster)[1] is MemberState.SUSPECT)
        answers = [await collect(cluster.control.dispatch, request((9, 8, turn))) for turn in range(3)]
        cluster.network.thaw(cluster.expected[1].address)

        assert [answer.done[0].decode_instance for answer in answers] == ["decode-2"] * 3
        await first.task
        assert first.tokens[0, 0] == expected(PROMPT, 8)
        assert (first.done[0].tries, first.done[0].decode_instance) == (1, "decode-1")
        await until(lambda: _states(cluster)[1] is MemberState.LIVING)


@pytest.mark.parametrize(("roles", "is_ready"), [("PD", False), ("PDD", True)])
@virtual
async def test_it_is_ready_while_a_pair_takes_work(roles: str, is_ready: bool) -> None:
    async with FakeCluster(roles, probes=True).serving() as cluster:
        await until(lambda: cluster.control.ready() and not cluster.control.readiness.due())
        cluster.network.freeze(cluster.expected[1].address)
        await until(lambda: _states(cluster)[1] is MemberState.SUSPECT)
        reported = report(cluster.control)

        assert (reported.ready, reported.missing) == (is_ready, ("decode-0 at 10.0.0.1:8001 (suspect: it is silent)",))
        cluster.network.thaw(cluster.expected[1].address)
        await until(lambda: _states(cluster)[1] is MemberState.LIVING)
        assert (report(cluster.control).ready, report(cluster.control).missing) == (True, ())


@pytest.mark.often("6.0-24.0", "0.1-8.5")
@pytest.mark.parametrize(("slowest_turn_s", "lost_after_s"), [(0.1, 8.5), (6.0, 24.0), (500.0, 120.0)])
@virtual
async def test_the_limit_of_progress_follows_the_slowest_step(slowest_turn_s: float, lost_after_s: float) -> None:
    async with FakeCluster("PD").serving() as cluster:
        cluster.instances[1].behaviour.slowest_turn_s = slowest_turn_s
        cluster.instances[1].get_stuck()
        stuck_at = _now()
        await until(lambda: _states(cluster)[1] is MemberState.LOST, timeout_s=200.0)

        assert lost_after_s <= _now() - stuck_at <= lost_after_s + 1.1


@virtual
async def test_an_in_process_engine_has_no_silence_or_progress_limit() -> None:
    async with FakeCluster("C", limits=inner_app.LIMITS).serving() as cluster:
        cluster.instances[0].get_stuck()
        await asyncio.sleep(600.0)
        cluster.network.freeze(cluster.expected[0].address)
        await asyncio.sleep(600.0)

        assert _states(cluster) == [MemberState.LIVING]


@virtual
async def test_reconnects_slow_down_until_a_session_has_lived() -> None:
    limits = ControlLimits()
    async with FakeCluster("PD").serving() as cluster:
        member = cluster.control.registry.members[1]
        pauses = []
        for session_s in (*13 * [0.0], 9.0):
            await asyncio.sleep(session_s)
            lost_at = _now()
            (session,) = cluster.instances[1].sessions
            session.lost()
            await until(lambda: not member.is_living)
            await until(lambda: member.is_living)
            pauses.append(_now() - lost_at)
        await asyncio.sleep(10.0)
        cluster.kill(1)
        cluster.boot(1, epoch=9)
        lost_at = _now()
        await until(lambda: not member.is_living)
        await until(lambda: member.is_living)

        assert pauses[-1] > 0.7 * limits.backoff_young_s
        assert pauses[0] < limits.backoff_most_s
        assert _now() - lost_at < limits.backoff_most_s


@virtual
async def test_a_suspect_that_is_lost_is_not_living_in_between(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with FakeCluster("PD").serving() as cluster:
        cluster.network.freeze(cluster.expected[1].address)
        await until(lambda: _states(cluster)[1] is MemberState.SUSPECT)
        caplog.clear()
        await until(lambda: _states(cluster)[1] is MemberState.LOST)

        messages = [record.message.split()[0] for record in caplog.records if "decode-0" in record.message]
        assert set(messages) == {"instance_lost"}


@virtual
async def test_the_reconnect_delay_has_a_maximum() -> None:
    limits = ControlLimits()
    async with FakeCluster("PD").serving() as cluster:
        member = cluster.control.registry.members[1]
        for _ in range(2000):  # of 8 s each: half a day
            member._note_life(0.0)

        assert 0.7 * limits.backoff_young_s < member._next_backoff() < 1.3 * limits.backoff_young_s


@pytest.mark.parametrize(("starved_for_s", "lasts_s"), [((0.0, 0.0), 5.0), ((3.0, 0.0), 8.0), ((2.0, 4.0), 9.0)])
@virtual
async def test_an_extended_timeout_leaves_out_the_longest_starvation(
    starved_for_s: tuple[float, float], lasts_s: float
) -> None:
    began = _now()

    def starved(most_s: float) -> float:
        return 100.0 + min(most_s, _now() - began)

    with pytest.raises(TimeoutError):
        async with extended_timeout(5.0, *(lambda most_s=most_s: starved(most_s) for most_s in starved_for_s)):
            await asyncio.sleep(60.0)

    assert _now() - began == pytest.approx(lasts_s)


@pytest.mark.parametrize(
    ("shares", "factors"),
    [
        ((0.0, 0.9, 0.9), [1.0, 10.0, 10.0]),
        ((0.9,) * 12, [10.0] * 12),
        ((0.0, 0.8) + (0.0,) * 6, [1.0, 5.0, 1.36, 1.25, 1.19, 1.19, 1.0, 1.0]),
    ],
)
def test_slowness_rises_at_once_and_forgets_a_stop(shares: tuple[float, ...], factors: list[float]) -> None:
    slowness, found, starved = Slowness(), [], 0.0
    slowness.measure(0.0, starved)
    for second, share in enumerate(shares, 1):
        starved += share
        slowness.measure(float(second), starved)
        found.append(round(slowness.factor, 2))

    assert found == factors


def test_slowness_is_bounded_and_reset_by_a_new_process() -> None:
    slowness, found = Slowness(), []
    for second, starved in ((0.0, 0.0), (1.0, 1.0), (2.0, 0.0), (3.0, 0.0)):
        slowness.measure(second, starved)
        found.append(slowness.factor)

    assert found == [1.0, MAX_SLOWNESS, 1.0, 1.0]


@virtual
async def test_a_stop_soon_after_another_is_detected_as_fast() -> None:
    async with FakeCluster("PD").serving() as cluster:
        behaviour = cluster.instances[1].behaviour
        behaviour.starved_share = 1.0  # as after a stop: all the time that passed counts as starved, then none
        await asyncio.sleep(4.0)
        behaviour.starved_share = 0.0
        behaviour.starved_before_s = _now()
        await asyncio.sleep(8.0)
        cluster.network.freeze(cluster.expected[1].address)
        await asyncio.sleep(4.0)
        states = [_states(cluster)[1]]
        await asyncio.sleep(4.0)
        states.append(_states(cluster)[1])

        assert states == [MemberState.SUSPECT, MemberState.LOST]
