"""Membership and liveness of instances: what shows only when processes meet."""

import asyncio
import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest

from scheduler.limits import ControlLimits
from scheduler.serving import report
from telemetry.capped_logs import LINES
from tests.scheduler.fake_cluster import FakeCluster, Running, collect, control_over, describe, expected, request
from tests.scheduler.virtual_time import until, virtual
from wire.connection import Connection, Session
from wire.description import InstanceDescription, ModelIdentity
from wire.errors import DeadlineExceeded, Incompatible, InstanceLost, Loading, PdserveError, Unavailable
from wire.kv_layout import KvTensor
from wire.messages import OpenSession
from wire.types import PROTOCOL_VERSION, KvEndpoint, Role

PROMPT = (1, 2, 3)


async def refusal(cluster: FakeCluster) -> str:
    """Run a cluster that never becomes ready and return why it ends."""
    with pytest.raises(Incompatible) as caught:
        async with asyncio.timeout(300):
            await cluster.control.run()
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": ModelIdentity("tiny", "cccc", "bbbb")}, "model weights differ: .*(aaaa|cccc).*(cccc|aaaa)"),
        ({"model": ModelIdentity("tiny", "aaaa", "dddd")}, "tokenizer differ: .*(bbbb|dddd).*(dddd|bbbb)"),
        ({"dtype": "bfloat16"}, "dtype differ: .*(float32|bfloat16).*(bfloat16|float32)"),
        ({"kv_tensors": (KvTensor(0, "k", 2, 8, "float32"),)}, "prefill-0.*decode-1.*differ: KV tensors: 2 here, 1"),
        (
            {"kv_tensors": (KvTensor(0, "k", 2, 8, "float32"), KvTensor(1, "latent", 1, 8, "float32"))},
            "differ: KV of layer 0: (.*, v 2x8 float32 here, k 2x8 float32 there|k 2x8 float32 here, .*, v 2x8)",
        ),
        ({"endpoints": (KvEndpoint("tcp", "10.0.0.1:1", "", 2),)}, "decode-1 .* listens for KV on ranks 2: .*from 0"),
        (
            {"protocol_version": 9},
            f"decode-0 .* uses protocol version 9, but the scheduler uses {PROTOCOL_VERSION}",
        ),
        ({"table_digest": "0ther"}, "decode-0 .*another global table: digest 0ther there, 7ab1e"),
    ],
)
@virtual
async def test_a_scheduler_never_ready_ends_for_a_mismatched_instance(changes: dict[str, Any], words: str) -> None:
    cluster = FakeCluster("PD")
    cluster.boot(0)
    cluster.boot(1, **changes)

    message = await refusal(cluster)

    assert re.search(words, message), message
    if "differ" in words:
        assert "prefill-0" in message
        assert "decode-1" in message


@virtual
async def test_ports_in_the_wrong_order_name_both_instances_and_values() -> None:
    cluster = FakeCluster("PD")
    for index, answers in ((0, 1), (1, 0)):
        there = describe(answers, (Role.PREFILL, Role.DECODE)[answers])
        cluster.boot(index, instance_id=there.instance_id, role=there.role, device_ids=there.device_ids)

    message = await refusal(cluster)

    assert "prefill-0 at 10.0.0.1:8000 should be server 10.0.0.1 devices 0" in message
    assert "decode decode-1" in message
    assert "is server 10.0.0.1 devices 1: is NODE_PORTS not in the table's order?" in message


@virtual
async def test_differences_the_wire_can_convert_are_accepted() -> None:
    cluster = FakeCluster("PD")
    cluster.boot(0)
    cluster.boot(1, block_size=32, num_blocks=10, device="npu")
    running = asyncio.create_task(cluster.control.registry.run())

    await cluster.control.registry.wait_path(5.0)

    assert cluster.control.registry.missing() == []
    running.cancel()


@virtual
async def test_a_serving_scheduler_refuses_a_mismatch_and_continues() -> None:
    async with FakeCluster("PDD").serving() as cluster:
        await collect(cluster.control.dispatch, request(PROMPT))
        cluster.kill(2)
        await until(lambda: cluster.control.registry.missing())
        cluster.boot(2, dtype="bfloat16")
        await until(lambda: cluster.control.view().instances[2].state == "refused")

        view = cluster.control.view().instances[2]
        assert "float32" in view.why
        assert "bfloat16" in view.why
        assert view.load is None
        assert (await collect(cluster.control.dispatch, request(PROMPT))).finishes
        cluster.boot(2)
        await until(lambda: not cluster.control.registry.missing())


@virtual
async def test_an_instance_returning_with_another_model_is_refused() -> None:
    async with FakeCluster("C").serving() as cluster:
        await collect(cluster.control.dispatch, request(PROMPT))
        cluster.kill(0)
        cluster.boot(0, model=ModelIdentity("other", "cccc", "dddd"))
        await until(lambda: cluster.control.view().instances[0].state == "refused")

        assert "combined-0 at 10.0.0.1:8000 has aaaa (tiny)" in cluster.control.view().instances[0].why


@virtual
async def test_a_scheduler_never_ready_names_what_is_missing() -> None:
    cluster = FakeCluster("PPD")
    cluster.boot(1)
    running = asyncio.create_task(cluster.control.run())

    with pytest.raises(DeadlineExceeded) as caught:
        await cluster.control.registry.wait_path(600.0)

    message = str(caught.value)
    assert "no path after 600 s" in message
    assert "prefill-0 at 10.0.0.1:8000 (nothing listens at 10.0.0.1:8000)" in message
    assert "decode-0 at 10.0.0.1:8002 (nothing listens" in message
    assert ":8001" not in message
    running.cancel()


@pytest.mark.parametrize(
    ("roles", "missing"),
    [
        ("P", "a decode instance"),
        ("D", "a prefill instance"),
        ("", "a prefill instance and a decode instance"),
        ("PPPDD", "; and 2 more"),
    ],
)
@virtual
async def test_a_client_without_a_path_gets_a_short_reason(roles: str, missing: str) -> None:
    cluster = FakeCluster(roles)
    registry = cluster.control.registry
    for index, role in enumerate(roles):
        cluster.boot(index, endpoints=(KvEndpoint("shm" if role == "P" else "tcp", f"at {index}", "boot/1", 0),))
    running = asyncio.create_task(registry.run())
    await until(lambda: not registry.missing())

    shown = [str(gap) for gap in registry.gaps()][:4]
    assert str(registry.no_path()) == f"no path can serve this now; missing: {'; '.join(shown)}{missing}"
    running.cancel()


@virtual
async def test_an_instance_that_is_late_or_restarts_is_admitted() -> None:
    cluster = FakeCluster("PD")
    cluster.boot(0)
    running = asyncio.create_task(cluster.control.registry.run())
    await asyncio.sleep(20.0)
    cluster.boot(1)
    await cluster.control.registry.wait_path(5.0)
    cluster.kill(0)
    await until(lambda: cluster.control.registry.missing())
    cluster.boot(0, epoch=77)
    await until(lambda: not cluster.control.registry.missing())

    assert (await collect(cluster.control.dispatch, request(PROMPT))).finishes
    assert len(cluster.network.dials) < 60  # backoff, not a busy loop
    running.cancel()


@virtual
async def test_an_instance_with_a_stuck_engine_is_not_admitted_again() -> None:
    async with FakeCluster("PD").serving() as cluster:
        cluster.instances[1].get_stuck()
        await asyncio.sleep(60.0)

        assert cluster.control.view().instances[1].state == "lost"
        assert "no progress" in cluster.control.view().instances[1].why
        cluster.instances[1].get_unstuck()
        await until(lambda: not cluster.control.registry.missing())


@virtual
async def test_the_instance_uses_the_schedulers_lease() -> None:
    async with FakeCluster("PD").serving() as cluster:
        cluster.instances[1].behaviour.step_s = 0.1
        reader = asyncio.create_task(collect(cluster.control.dispatch, request(PROMPT, max_tokens=900)))
        await asyncio.sleep(30.0)
        assert cluster.blocks_used == [0, 1]
        cluster.network.freeze(cluster.expected[1].address)
        await asyncio.sleep(15.0)

        assert cluster.blocks_used == [0, 0]
        assert reader.exception() is not None


class Undescribed:
    """Connects, and answers each request for its description with the next of these errors."""

    def __init__(self, errors: Iterator[PdserveError]) -> None:
        self._errors = errors

    async def describe(self, timeout_s: float) -> InstanceDescription:
        raise next(self._errors)

    async def open(self, hello: OpenSession, timeout_s: float) -> Session:
        raise AssertionError("never described")

    async def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize(
    ("later", "state"),
    [
        (Loading("loading its model"), "starting"),
        (DeadlineExceeded("no answer within 5 s"), "starting"),
        (InstanceLost("nothing listens"), "lost"),
    ],
    ids=["it-loads", "it-answers-late", "it-is-gone"],
)
@virtual
async def test_a_restarting_instance_is_starting_while_it_loads(later: PdserveError, state: str) -> None:
    cluster = FakeCluster("PD")
    cluster.boot(0)
    first = Loading(f"{cluster.expected[0].address}: still loading")
    loading = itertools.chain([first], itertools.repeat(later))
    restarted = False

    def connect(address: str) -> Connection:
        loads = restarted and address == cluster.expected[0].address
        return Undescribed(loading) if loads else cluster.network.connect(address)

    control = control_over(cluster.expected, connect, ControlLimits())
    running = asyncio.create_task(control.registry.run())
    await until(lambda: control.view().instances[0].state == "living")
    restarted = True
    cluster.kill(0)
    await until(lambda: control.view().instances[0].state == "lost")

    await until(lambda: control.view().instances[0].why == "still loading")
    assert control.view().instances[0].state == "starting"
    await until(lambda: control.view().instances[0].why == str(later))
    assert control.view().instances[0].state == state
    running.cancel()


@virtual
async def test_an_instance_whose_error_always_differs_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "pdserve.registry")
    cluster = FakeCluster("PD")
    cluster.boot(1)
    tries = itertools.count()
    errors = (Unavailable(f"words number {number}") for number in tries)

    def connect(address: str) -> Connection:
        return Undescribed(errors) if address.endswith(":8000") else cluster.network.connect(address)

    control = control_over(cluster.expected, connect, ControlLimits())
    running = asyncio.create_task(control.registry.run())
    await asyncio.sleep(300.0)

    assert next(tries) > 500
    assert "words number" in str(control.registry.missing()[0])
    # CappedLog's window is of real time: all 300 virtual seconds are in one
    assert 1 < sum("words number" in line for line in caplog.messages) <= LINES
    running.cancel()


@pytest.mark.parametrize("choice", ["local", "fail"])
@pytest.mark.parametrize(("killed", "role"), [(0, Role.PREFILL), (1, Role.DECODE)])
@virtual
async def test_a_gone_role_ends_requests_or_leaves_the_other_serving(killed: int, role: Role, choice: str) -> None:
    other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
    limits, prompt = ControlLimits(may_lack=frozenset({role if choice == "local" else other})), (5, 6, 7)
    async with FakeCluster("PD", limits=limits).serving() as cluster:
        control = cluster.control
        registry, dispatch = control.registry, control.dispatch
        stream = Running(dispatch, request(prompt, max_tokens=40))
        await until(lambda: len(stream.tokens.get((0, 0), ())) > 2)
        begun = Running(dispatch, request(PROMPT, max_tokens=40))
        await asyncio.sleep(0)
        cluster.kill(killed)
        results = await asyncio.gather(stream.task, begun.task, return_exceptions=True)
        await until(lambda: len(registry.living()) == 1)

        lost = [choice == "fail" and role is Role.DECODE, choice == "fail"]
        assert [isinstance(one, InstanceLost) for one in results] == lost
        for answer, ids, is_lost in zip((stream, begun), (prompt, PROMPT), lost, strict=True):
            assert is_lost or answer.tokens == {(0, 0): expected(ids, 40)}
        for _ in range(3):
            if choice == "fail":
                with pytest.raises(Unavailable, match=f"missing: {role}-0"):
                    await collect(dispatch, request(prompt))
            else:
                alone = await collect(dispatch, request(prompt))
                assert (alone.done[0].path, alone.tokens) == ("local", {(0, 0): expected(prompt, 4)})
        served = {"prefill": 0, "decode": 0} | {role.value: 0 if choice == "fail" else 4 + (role is Role.DECODE)}
        assert (report(control).view["roles_gone"], dispatch.ledger.served_without) == ({role: choice}, served)

        cluster.boot(killed)
        await until(lambda: len(registry.living()) == 2)
        assert [one.role for one in registry.living()] == [Role.PREFILL, Role.DECODE]
        assert (await collect(dispatch, request(prompt))).done[0].path == "handoff"
        assert (report(control).view["roles_gone"], dispatch.ledger.served_without) == ({}, served)
