"""Measuring the links of all pairs: which ones, the errors of those that cannot answer, and a limit for each wait."""

import asyncio
import dataclasses

import pytest

from scheduler.links.probe import LinkProbe, Pair, PairLink
from scheduler.pending_answers import PendingAnswers
from scheduler.serving import report
from simulation.instance import SimulatedInstance
from tests.scheduler.fake_cluster import FakeCluster
from tests.scheduler.test_over_grpc import serving as serving_over_grpc
from tests.scheduler.virtual_time import until, virtual
from wire.errors import InstanceLost, InvalidRequest, Overloaded
from wire.load import LinkStatus, LoadSnapshot
from wire.messages import LinkMeasured

MIB = 2**20


class _Linked(SimulatedInstance):
    """Reports the links in `reported_links`."""

    reported_links: tuple[LinkStatus, ...] = ()

    def load(self) -> LoadSnapshot:
        return dataclasses.replace(super().load(), links=self.reported_links)


async def measured(probe: LinkProbe, num_bytes: int = MIB) -> list[PairLink]:
    """Return the links of all pairs."""
    return [one async for one in probe.measure(num_bytes) if isinstance(one, PairLink)]


@virtual
async def test_pairs_are_named_by_role_and_index_in_the_table() -> None:
    async with FakeCluster("DPCPD").serving() as cluster:
        pairs = [(pair.prefill, pair.decode) for pair in LinkProbe(cluster.control.registry).pairs()]

        assert pairs == [(p, d) for p in ("prefill-0", "prefill-1") for d in ("decode-0", "decode-1")]


@virtual
async def test_a_lost_instance_is_reported_and_other_links_are_measured() -> None:
    async with FakeCluster("PDD").serving() as cluster:
        cluster.kill(1)
        await until(lambda: len(cluster.control.registry.living()) == 2)

        lost, found = await measured(LinkProbe(cluster.control.registry))

        (reported,) = [one for one in report(cluster.control).view["instances"] if one["why"]]
        assert lost.error == f"{reported['address']} is {reported['state']}: {reported['why']}"
        assert lost.link is None
        assert lost.error.startswith("10.0.0.1:8001 is lost: ")
        assert found.error == ""
        assert found.link is not None
        assert found.link.peer_id == "decode-2"


@virtual
async def test_an_instances_reason_for_an_unmeasured_link_is_shown() -> None:
    async with FakeCluster("PD").serving() as cluster:
        del cluster.peers["decode-1"]

        (reported,) = await measured(LinkProbe(cluster.control.registry))

        assert (reported.link, reported.error) == (None, "decode-1 cannot be reached")


@virtual
async def test_a_silent_instance_costs_at_most_its_deadline() -> None:
    async with FakeCluster("PD").serving() as cluster:
        cluster.instances[0].behaviour.ignores_commands = True
        began = asyncio.get_running_loop().time()

        (reported,) = await measured(LinkProbe(cluster.control.registry, timeout_s=7.0))

        assert reported.error == "prefill-0 did not report on this link within 7 s"
        assert asyncio.get_running_loop().time() - began == pytest.approx(7.0)
        cluster.instances[0].behaviour.ignores_commands = False
        (again,) = await measured(LinkProbe(cluster.control.registry))
        assert again.error == ""


@virtual
async def test_an_instance_that_dies_meanwhile_is_reported_at_once() -> None:
    async with FakeCluster("PD").serving() as cluster:
        cluster.instances[0].behaviour.ignores_commands = True
        began = asyncio.get_running_loop().time()
        asyncio.get_running_loop().call_later(0.5, cluster.kill, 0)

        (reported,) = await measured(LinkProbe(cluster.control.registry))

        assert reported.error.startswith("prefill-0 was lost")
        assert asyncio.get_running_loop().time() - began < 1.0


@virtual
async def test_frames_are_checked_unless_both_ends_disable_it() -> None:
    cluster = FakeCluster("PPDD")
    for index, wants in enumerate((False, True, False, True)):
        cluster.boot(index, kv_digests=wants)
    running = asyncio.create_task(cluster.control.registry.run())
    await until(lambda: not cluster.control.registry.missing())

    reported = await measured(LinkProbe(cluster.control.registry), 0)

    assert [one.digests for one in reported] == [False, True, True, True]
    assert [one.kv_digests for one in cluster.control.view().instances] == ["off", "on", "off", "on"]
    running.cancel()


@virtual
async def test_better_transports_not_offered_are_listed_with_reasons() -> None:
    cluster = FakeCluster("PD")
    cluster.boot(0, kv_transports=("cuda_ipc: no GPU", "shm: not named", "fake", "tcp"))
    cluster.boot(1)
    running = asyncio.create_task(cluster.control.registry.run())
    await until(lambda: not cluster.control.registry.missing())

    (reported,) = await measured(LinkProbe(cluster.control.registry))

    assert reported.link is not None
    assert reported.link.transport == "fake"
    assert reported.not_offered == ("cuda_ipc: no GPU", "shm: not named")
    running.cancel()


@virtual
@pytest.mark.parametrize(("used", "better"), [("tcp", ("cuda_ipc: no GPU", "shm: not named")), ("", ())])
async def test_all_better_transports_are_listed(used: str, better: tuple[str, ...]) -> None:
    words = ("cuda_ipc: no GPU", "shm: not named", "mooncake", "tcp")
    cluster = FakeCluster("PD")
    cluster.kind = _Linked
    _Linked.reported_links = (LinkStatus("decode-1", used, "up" if used else "connecting", 1, 0, 0),)
    cluster.boot(0, kv_transports=words)
    cluster.boot(1)
    running = asyncio.create_task(cluster.control.registry.run())
    await until(lambda: not cluster.control.registry.missing())

    (reported,) = await measured(LinkProbe(cluster.control.registry), 0)

    assert reported.not_offered == better
    running.cancel()


@virtual
async def test_without_a_measurement_the_current_process_is_shown() -> None:
    cluster = FakeCluster("PD")
    cluster.kind = _Linked
    old, new = LinkStatus("decode-1", "tcp", "lost", 1, 9, 2), LinkStatus("decode-1", "shm", "up", 2, 5, 0)
    for reported_links in ((old, new), (new, old)):
        _Linked.reported_links = reported_links
        async with cluster.serving():
            (shown,) = await measured(LinkProbe(cluster.control.registry), 0)

            assert shown.link == new
        cluster.kill(0)
        cluster.kill(1)
        cluster = FakeCluster("PD")
        cluster.kind = _Linked


@virtual
async def test_measurements_run_one_at_a_time_and_have_a_size_limit() -> None:
    async with FakeCluster("PD").serving() as cluster:
        probe = LinkProbe(cluster.control.registry)
        first = probe.measure(MIB)
        assert isinstance(await anext(first), Pair)
        with pytest.raises(Overloaded, match="one measurement at a time"):
            await anext(probe.measure(MIB))
        await first.aclose()

        assert len(await measured(probe)) == 1
        for num_bytes in (-1, 256 * MIB + 1):
            with pytest.raises(InvalidRequest, match=f"cannot measure with {num_bytes} bytes: 0 to {256 * MIB} are"):
                await anext(probe.measure(num_bytes))


@virtual
async def test_answers_reach_only_their_waiters() -> None:
    answers = PendingAnswers[LinkMeasured]()
    answers.deliver("d", LinkMeasured("d", None))
    with answers.expect("d", "busy") as answer:
        answers.deliver("other", LinkMeasured("other", None))
        assert not answer.done()
        with pytest.raises(Overloaded, match="it is measured"), answers.expect("d", "it is measured"):
            pass
        answers.deliver("d", LinkMeasured("d", None, "x"))
        answers.deliver("d", LinkMeasured("d", None, "late"))
        assert (await answer).error == "x"
    with answers.expect("d", "busy") as left, answers.expect("e", "busy"):
        answers.end(InstanceLost("gone"))
        assert isinstance(left.exception(), InstanceLost)
    with pytest.raises(InstanceLost, match="gone"), answers.expect("d", "busy"):
        pass


def test_measuring_works_over_grpc_too() -> None:
    async def run() -> None:
        async with asyncio.timeout(300), serving_over_grpc() as cluster:
            (reported,) = await measured(LinkProbe(cluster.control.registry))

            assert reported.error == ""
            assert reported.link is not None
            assert (reported.link.transport, reported.link.bytes_per_s) == ("fake", 1e9)

    asyncio.run(run())


@virtual
async def test_without_measuring_the_last_figures_are_shown() -> None:
    cluster = FakeCluster("PD")
    cluster.kind = _Linked
    up = LinkStatus("decode-1", "tcp", "up", 1, 9, 2)
    _Linked.reported_links = (up,)
    async with cluster.serving():
        probe = LinkProbe(cluster.control.registry)
        (before,) = await measured(probe, 0)
        await measured(probe)
        (after,) = await measured(probe, 0)
        cluster.kill(1)
        await until(lambda: bool(cluster.control.registry.missing()))
        cluster.boot(1, epoch=99)
        await until(lambda: not cluster.control.registry.missing())
        (anew,) = await measured(probe, 0)

        _Linked.reported_links = (LinkStatus("decode-1", "", "connecting", 0, 0, 0),)
        cluster.kill(0)
        await until(lambda: bool(cluster.control.registry.missing()))
        cluster.boot(0)
        await until(lambda: not cluster.control.registry.missing())
        (wholly,) = await measured(probe)
        (older,) = await measured(probe, 0)

    assert before.link == anew.link == up
    assert after.link == dataclasses.replace(up, round_trip_s=0.0001, bytes_per_s=1e9)
    assert older.link == wholly.link
