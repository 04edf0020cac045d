"""A prefill and a decode instance without a common KV transport: reported when they meet, and never given a prompt."""

import asyncio
import itertools
import logging
from dataclasses import replace

import pytest

from scheduler.links.probe import LinkProbe
from scheduler.membership.compatibility import ExpectedInstance
from scheduler.membership.kv_pairs import GapKind, KvPairs, missing_transport
from scheduler.request import GenerationRequest
from scheduler.serving import report
from simulation.instance import SimulatedInstance
from tests.scheduler.fake_cluster import FakeCluster, collect, describe, request
from tests.scheduler.test_link_probe import measured
from tests.scheduler.virtual_time import until, virtual
from wire.description import ForeignWorker, InstanceDescription
from wire.errors import Unavailable
from wire.load import LinkStatus, LoadSnapshot
from wire.messages import MeasureLink, Prefill
from wire.types import KvEndpoint, Role

PROMPT = (1, 2, 3, 4, 5)
APART = "prefill-0 has shm and decode-0 has tcp"


def offers(*transports: str, host: str = "boot/1", ranks: int = 1) -> tuple[KvEndpoint, ...]:
    """Return the endpoints of an instance with these transports."""
    return tuple(
        KvEndpoint(name, f"at {name}", host if name in ("cuda_ipc", "shm") else "", rank)
        for rank in range(ranks)
        for name in transports
    )


def _with_endpoints(role: Role, endpoints: tuple[KvEndpoint, ...]) -> InstanceDescription:
    return describe(0, role, endpoints=endpoints)


@pytest.mark.parametrize(
    ("sender", "receiver", "words"),
    [
        (offers("shm", "tcp"), offers("tcp", host="boot/2"), None),
        (offers("shm"), offers("shm", "tcp"), None),
        (offers("process_group"), offers("process_group", host="other/1", ranks=2), None),
        (offers(), offers("tcp"), None),
        (offers("shm"), offers("tcp"), "name one transport for both in --kv-transport"),
        (offers("tcp"), offers("mooncake"), "name one transport for both in --kv-transport"),
        (offers("shm"), offers("shm", host="boot/2"), "shm cannot cross hosts or network namespaces"),
        (offers("shm", "mooncake"), offers("shm", "tcp", host="boot/2"), "shm cannot cross hosts"),
        (offers("cuda_ipc", "shm"), offers("cuda_ipc", "shm", host="x/2"), "cuda_ipc, shm cannot cross hosts"),
    ],
)
def test_two_instances_need_a_transport_that_reaches(
    sender: tuple[KvEndpoint, ...], receiver: tuple[KvEndpoint, ...], words: str | None
) -> None:
    reported = missing_transport(_with_endpoints(Role.PREFILL, sender), _with_endpoints(Role.DECODE, receiver))

    assert reported is None if words is None else reported is not None and words in reported


def test_workers_of_another_engine_never_pair_with_our_instances() -> None:
    pairs = KvPairs()
    for index, (role, address) in enumerate(itertools.product((Role.PREFILL, Role.DECODE), ("http://w:1", "h:1"))):
        described = describe(index, role, endpoints=offers("tcp"))
        if address.startswith("http"):
            described = replace(described, worker=ForeignWorker("vLLM 0.32.0", "prefill_first", 1))
        pairs.add(ExpectedInstance(index, "", role, address, "", ()), described)

    gaps = {(one.sender, one.receiver): one.kind for one in pairs.gaps({0, 1, 2, 3})}

    assert gaps == {(0, 2): GapKind.UNPROVEN, (0, 3): GapKind.OTHER_ENGINE, (1, 2): GapKind.OTHER_ENGINE}


def _cluster_with_transports(roles: str, *transports: str, **changes: object) -> FakeCluster:
    cluster = FakeCluster(roles, **changes)  # type: ignore[arg-type]
    cluster.descriptions = [
        describe(index, one.role, endpoints=offers(name))
        for index, (one, name) in enumerate(zip(cluster.descriptions, transports, strict=True))
    ]
    return cluster


def _serve(cluster: FakeCluster) -> "asyncio.Task[None]":
    for index in range(len(cluster.descriptions)):
        cluster.boot(index)
    return asyncio.create_task(cluster.control.run())


@virtual
async def test_the_only_pair_is_named_and_a_client_gets_the_reason_at_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pdserve")
    cluster = _cluster_with_transports("PD", "shm", "tcp")
    running = _serve(cluster)
    await until(lambda: not cluster.control.registry.missing())
    await asyncio.sleep(30.0)  # virtual: probes, heartbeats and reconnects repeat nothing

    assert not running.done()
    assert [str(gap) for gap in cluster.control.registry.gaps()] == [
        f"no usable KV transport: {APART}; name one transport for both in --kv-transport"
    ]
    reported = report(cluster.control)
    assert not reported.ready
    assert any(APART in missing for missing in reported.missing)
    with pytest.raises(Unavailable, match=f"no path can serve this now; missing: .*{APART}"):
        await collect(cluster.control.dispatch, request(PROMPT))
    messages = [line for line in caplog.messages if line.startswith("no_kv_transport")]
    assert len(messages) == 1
    assert "10.0.0.1:8000" in messages[0]
    assert "10.0.0.1:8001" in messages[0]
    assert not any(isinstance(command, Prefill) for command in cluster.instances[0].commands)
    running.cancel()


@virtual
async def test_prompts_and_probes_use_only_the_pairs_that_work() -> None:
    cluster = _cluster_with_transports("PPDD", "shm", "tcp", "shm", "tcp")
    running = _serve(cluster)
    await until(lambda: cluster.control.ready() and not cluster.control.registry.missing())

    for _ in range(6):
        answer = await collect(cluster.control.dispatch, request(PROMPT))
        (done,) = answer.done.values()
        assert (done.prefill_instance, done.decode_instance) in {("prefill-0", "decode-2"), ("prefill-1", "decode-3")}
    plans = {plan.pair for plan in cluster.control.readiness.living_plans()}
    assert plans == {(0, 2), (1, 3)}
    assert cluster.control.dispatch.ledger.retried_prompts == 0
    running.cancel()


@virtual
async def test_a_waiting_prompt_fails_when_the_last_working_pair_is_lost() -> None:
    cluster = _cluster_with_transports("PDD", "shm", "tcp", "shm")
    running = _serve(cluster)
    await until(lambda: cluster.control.ready() and not cluster.control.registry.missing())
    cluster.instances[0].get_stuck()
    answers = [asyncio.create_task(collect(cluster.control.dispatch, _long_request())) for _ in range(12)]
    await asyncio.sleep(0)
    assert cluster.control.dispatch.admission.num_waiting > 0
    cluster.kill(2)

    _, left = await asyncio.wait(answers, timeout=1.0)

    assert not left
    errors = [answer.exception() for answer in answers]
    assert any(isinstance(error, Unavailable) and APART in str(error) for error in errors)
    running.cancel()


def _long_request() -> GenerationRequest:
    return request(tuple(range(1, 100)))


@virtual
async def test_a_returning_instance_with_a_common_transport_is_used(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pdserve")
    cluster = _cluster_with_transports("PD", "shm", "tcp")
    running = _serve(cluster)
    await until(lambda: cluster.control.registry.gaps())
    cluster.kill(1)
    await until(lambda: cluster.control.registry.missing())
    assert cluster.control.registry.gaps() == []
    cluster.boot(1, endpoints=offers("shm", "tcp"))

    await until(cluster.control.ready)

    assert report(cluster.control).missing == ()
    assert sum(line.startswith("kv_transport_found") for line in caplog.messages) == 1
    running.cancel()


@virtual
async def test_measuring_an_impossible_pair_needs_no_instance() -> None:
    cluster = _cluster_with_transports("PD", "shm", "tcp")
    running = _serve(cluster)
    await until(lambda: cluster.control.registry.gaps())

    (reported,) = await measured(LinkProbe(cluster.control.registry))

    assert APART in reported.error
    assert not any(isinstance(command, MeasureLink) for command in cluster.instances[0].commands)
    running.cancel()


@virtual
async def test_a_pair_without_transport_shows_no_stale_link() -> None:
    class Linked(SimulatedInstance):
        def load(self) -> LoadSnapshot:
            return replace(super().load(), links=(LinkStatus("decode-1", "shm", "lost", 1, 9, 1),))

    cluster = _cluster_with_transports("PD", "shm", "tcp")
    cluster.kind = Linked
    running = _serve(cluster)
    await until(lambda: cluster.control.registry.gaps())

    (reported,) = await measured(LinkProbe(cluster.control.registry))

    assert reported.link is None
    assert APART in reported.error
    running.cancel()


@virtual
async def test_the_metrics_have_the_pair_with_its_reason() -> None:
    from scheduler.observability.metrics import Metrics

    cluster = _cluster_with_transports("PD", "shm", "tcp")
    running = _serve(cluster)
    await until(lambda: cluster.control.registry.gaps())

    page = Metrics(cluster.control.view).render().decode()

    (line,) = [line for line in page.splitlines() if line.startswith("pdserve_link_impossible{")]
    assert 'instance="prefill-0",peer="decode-1"' in line
    assert APART in line
    running.cancel()
