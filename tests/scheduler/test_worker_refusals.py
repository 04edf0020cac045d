"""Workers that do not fit: each is named with its URL and the reason, and left out while the others serve."""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.ports import free_ports
from scheduler.limits import ControlLimits
from scheduler.membership.compatibility import ExpectedInstance
from scheduler.membership.member import Member
from scheduler.membership.worker_groups import WorkerGroups
from scheduler.placement import Plan
from scheduler.request import GenerationRequest, TokenSink
from scheduler.workers.connection import WorkerConnection
from scheduler.workers.session import WorkerSession
from testing.vllm_worker.settings import WorkerSettings
from testing.vllm_worker.worker import FakeVllmWorker
from tests.scheduler.fake_cluster import TABLE_DIGEST, control_over, describe
from tests.scheduler.virtual_time import until, virtual
from tests.scheduler.worker_cluster import ROLES, SETTINGS
from wire.description import InstanceDescription, ModelIdentity
from wire.errors import Incompatible, NoCapacity, Unavailable
from wire.messages import OpenSession, RoleHeld
from wire.types import KvEndpoint, Role

HTML = b"<html>It works!</html>"
FOREIGN: dict[str, tuple[WorkerSettings | None, str]] = {
    "another model": (dataclasses.replace(SETTINGS, model="other"), "models differ: "),
    "another version": (dataclasses.replace(SETTINGS, version="0.33.0"), "engines differ: "),
    "a key": (dataclasses.replace(SETTINGS, api_key="s"), "answered 401: Unauthorized; it needs a key: --worker"),
    "no vLLM": (None, "/version answered '<html>It works!</html>', not a JSON object: is it a vLLM server?"),
}
"""The settings of each, None for a server of HTML, and the reason."""


@asynccontextmanager
async def _listening(settings: WorkerSettings | None, port: int) -> AsyncIterator[None]:
    if settings is None:
        server = await asyncio.start_server(_answer_html, "127.0.0.1", port)
        yield
        server.close()
        return
    worker = FakeVllmWorker(dataclasses.replace(settings, port=port))
    await worker.start()
    yield
    await worker.stop()


async def _answer_html(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError):
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n" % len(HTML) + HTML)
    writer.close()


def _expected(*ports: int, roles: str = "PDD") -> list[ExpectedInstance]:
    return [
        ExpectedInstance(at, f"worker-{at}", ROLES[roles[at]], f"http://127.0.0.1:{port}", "", ())
        for at, port in enumerate(ports)
    ]


@pytest.mark.parametrize(("settings", "why"), FOREIGN.values(), ids=FOREIGN)
@pytest.mark.anyio
async def test_a_worker_that_does_not_fit_is_named_and_left_out(settings: WorkerSettings | None, why: str) -> None:
    expected = _expected(*free_ports(3))
    ports = [int(one.address.rpartition(":")[2]) for one in expected]
    control = control_over(expected, WorkerConnection, ControlLimits())
    async with contextlib.AsyncExitStack() as stack:
        for port in ports[:2]:
            await stack.enter_async_context(_listening(SETTINGS, port))
        running = asyncio.create_task(control.run())
        try:
            await until(control.ready, timeout_s=30.0)
            await stack.enter_async_context(_listening(settings, ports[2]))
            await until(lambda: control.view().instances[2].state == "refused", timeout_s=30.0)

            assert why in control.view().instances[2].why
            assert expected[2].address in control.view().instances[2].why
            assert control.ready()
        finally:
            await control.dispatch.close(0.0)
            running.cancel()
            await asyncio.wait({running})


@pytest.mark.parametrize(("settings", "why"), FOREIGN.values(), ids=FOREIGN)
@pytest.mark.anyio
async def test_nothing_left_to_serve_ends_the_scheduler(settings: WorkerSettings | None, why: str) -> None:
    expected = _expected(*free_ports(2))
    ports = [int(one.address.rpartition(":")[2]) for one in expected]
    async with _listening(SETTINGS, ports[0]), _listening(settings, ports[1]):
        with pytest.raises(Incompatible) as caught:  # exit status 2
            async with asyncio.timeout(30.0):
                await control_over(expected, WorkerConnection, ControlLimits()).run()

    assert why in str(caught.value)
    assert expected[1].address in str(caught.value)


@pytest.mark.parametrize(("roles", "wrong"), [("PPD", 0), ("PDD", 1)])
@pytest.mark.anyio
async def test_a_wrong_worker_that_answers_first_is_left_out(roles: str, wrong: int) -> None:
    expected = _expected(*free_ports(3), roles=roles)
    ports = [int(one.address.rpartition(":")[2]) for one in expected]
    other = dataclasses.replace(SETTINGS, model="other")
    control = control_over(expected, WorkerConnection, ControlLimits())
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(_listening(other, ports[wrong]))
        running = asyncio.create_task(control.run())
        try:
            await until(lambda: "no other worker of its version" in control.view().instances[wrong].why, timeout_s=30.0)
            for port in ports[:wrong] + ports[wrong + 1 :]:
                assert not control.ready()
                await stack.enter_async_context(_listening(SETTINGS, port))
            await until(control.ready, timeout_s=30.0)
            await until(lambda: control.view().instances[wrong].state == "refused", timeout_s=30.0)
            assert "models differ: " in control.view().instances[wrong].why
        finally:
            await control.dispatch.close(0.0)
            running.cancel()
            await asyncio.wait({running})


DIFFER, WAITS = "^models differ: http://1 has one, http://.* has other", "^no other worker of its version and model"
FIRST = {
    "a pair": ("P one, D one", "", None),
    "a combined one": ("D one, C other", "", None),
    "while the other role is missing": ("P one", "D", WAITS),
    "where it is refused": ("P one", "", WAITS),
    "not the model of a pair": ("P one, D one, D other", "", DIFFER),
    "a wrong one before it": ("P one, D other", "D", WAITS),
    "a wrong one before it, and nobody to come": ("P one, D other", "", DIFFER),
    "a pair, but not of the scheduler's model": ("P one, P mine, D one", "D", WAITS),
    "a pair of the scheduler's model": ("P one, D one, P mine, D mine", "", None),
    "a role that may be missing": ("D one, D lone", "", None),
}
"""The workers that have reported, the roles of those that have not, and why the last one is not accepted."""


@pytest.mark.parametrize(("reported", "unknown", "why"), FIRST.values(), ids=FIRST)
def test_the_first_workers_accepted_are_those_that_can_serve(reported: str, unknown: str, why: str | None) -> None:
    groups = WorkerGroups(("mine",), {Role.PREFILL} if "lone" in reported else ())
    for index, (role, model) in enumerate(one.split() for one in reported.split(", ")):
        endpoints = (KvEndpoint("", f"http://{index + 1}"),)
        described = describe(index, ROLES[role], endpoints=endpoints, model=ModelIdentity(model, "", ""))
        groups.note(ExpectedInstance(index, "", ROLES[role], "", "", ()), described)

    with contextlib.nullcontext() if why is None else pytest.raises((Incompatible, Unavailable), match=why):
        groups.check_first(index, {ROLES[role] for role in unknown})


@virtual
async def test_a_refused_worker_is_asked_again_with_growing_pauses() -> None:
    clock, asked = asyncio.get_running_loop().time, list[float]()

    async def describe(timeout_s: float) -> None:
        asked.append(clock())
        raise Incompatible("no")

    async def close() -> None:
        pass

    registry: Any = SimpleNamespace(refuse=lambda expected, error: None, changed=lambda: None)
    connect: Any = lambda address: SimpleNamespace(describe=describe, close=close)  # noqa: E731
    member = Member(_expected(1)[0], registry, connect, ControlLimits(), random.Random(0))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(60.0):
            await member.run()

    pauses = [later - sooner for sooner, later in itertools.pairwise(asked)]
    assert pauses[:4] == sorted(pauses[:4])
    assert pauses[0] < pauses[3]
    assert pauses[-1] == ControlLimits().refused_retry_s


class _OwnConnection(WorkerConnection):
    """A connection to a fake worker that stands for an instance of pdserve's own."""

    async def describe(self, timeout_s: float) -> InstanceDescription:
        found = await super().describe(timeout_s)
        self._description = dataclasses.replace(found, worker=None, table_digest=TABLE_DIGEST)
        return self._description

    async def open(self, hello: OpenSession, timeout_s: float) -> WorkerSession:
        session = await super().open(hello, timeout_s)
        session._emit(RoleHeld(Role.COMBINED, 0))  # as an instance does after SessionOpen
        return session


OURS = {
    "the same model": (0, False),
    "another model": (1, False),
    "another model, found once ours has room": (1, True),
}
"""The salt of our own instance's model, and whether it is full at first."""


@pytest.mark.combinations(2)
@pytest.mark.parametrize(("salt", "is_full"), OURS.values(), ids=OURS)
@pytest.mark.parametrize("is_first", [True, False], ids=["ours first", "workers first"])
@pytest.mark.parametrize("roles", ["PD", "C"])
@pytest.mark.anyio
async def test_a_worker_must_serve_the_model_of_our_instances(
    roles: str, salt: int, is_full: bool, is_first: bool, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO, "pdserve")
    ours = dataclasses.replace(SETTINGS, fake=dataclasses.replace(SETTINGS.fake, salt=salt))
    *ports, port = free_ports(1 + len(roles))
    entry = ExpectedInstance(2, "combined-0", Role.COMBINED, f"127.0.0.1:{port}", "", ())
    control = control_over([*_expected(*ports, roles=roles), entry], _connect, ControlLimits())
    full, pairs, pair = _Full(control.dispatch.probe, is_full), control.registry.kv_pairs, (0, len(roles) - 1)
    monkeypatch.setattr(control.dispatch, "probe", full.probe)
    groups = [[(ours, port)], [(SETTINGS, at) for at in ports]]
    async with contextlib.AsyncExitStack() as stack:
        running = asyncio.create_task(control.run())
        try:
            for group in groups if is_first else reversed(groups):
                for settings, at in group:
                    await stack.enter_async_context(_listening(settings, at))
                await until(control.ready, timeout_s=30.0)
            await until(lambda: not control.registry.missing(), timeout_s=30.0)
            why = "it does not serve the model of combined-0: token 0 is"
            if is_full:  # no verdict: the workers serve, or go on to
                await until(lambda: full.num_refused > 0 and pairs.gap(*pair) is None, timeout_s=30.0)
                assert _num_proven(caplog) == (roles == "PD" or is_first)
                full.is_full = False
            if salt:
                await until(lambda: why in str(pairs.gap(*pair)), timeout_s=30.0)
            else:
                await until(lambda: "worker_compared" in str(caplog.messages), timeout_s=30.0)
                await until(lambda: pairs.gap(*pair) is None, timeout_s=30.0)
            assert any(plan.decode == pair[1] for plan in control.readiness.living_plans()) is (salt == 0)
        finally:
            await control.dispatch.close(0.0)
            running.cancel()
            await asyncio.wait({running})


class _Full:
    """Refuses the proofs on our own instance, index 2, while it is full."""

    def __init__(self, probe: Callable[[GenerationRequest, Plan, TokenSink], Awaitable[None]], is_full: bool) -> None:
        self._probe, self.is_full, self.num_refused = probe, is_full, 0

    async def probe(self, request: GenerationRequest, plan: Plan, sink: TokenSink) -> None:
        if self.is_full and plan.decode == 2 and request.request_id == "proof":
            self.num_refused += 1
            raise NoCapacity("full")
        await self._probe(request, plan, sink)


def _num_proven(caplog: pytest.LogCaptureFixture) -> int:
    return sum(line.startswith("pair_proven") for line in caplog.messages)


def _connect(address: str) -> WorkerConnection:
    return WorkerConnection(address) if "://" in address else _OwnConnection(f"http://{address}")
