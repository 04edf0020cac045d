"""Membership changes while the scheduler serves: new instances are used, removed ones finish their work."""

import asyncio
import dataclasses
from typing import Any

import pytest

from scheduler.limits import ControlLimits
from scheduler.membership.compatibility import ExpectedInstance
from simulation.instance import SimulatedInstance
from testing.wire.fake_network import FakeSession
from tests.scheduler.fake_cluster import (
    TABLE_DIGEST,
    Answer,
    FakeCluster,
    Running,
    collect,
    describe,
    expected,
    request,
)
from tests.scheduler.virtual_time import until, virtual
from wire.description import ModelIdentity
from wire.errors import Unavailable
from wire.types import Role

PROMPT = (1, 2, 3)
NEW_DIGEST = "7ab1e2"


class LiveCluster(FakeCluster):
    """A fake cluster whose table changes."""

    def __init__(self, roles: str, **changes: Any) -> None:
        super().__init__(roles, **changes)
        self.all = list(self.expected)

    def add(self, role: Role, *, boot: bool = True, digest: str = TABLE_DIGEST, **changes: Any) -> ExpectedInstance:
        """Add an instance to the list that `use` takes; return its entry."""
        index = len(self.descriptions)
        self.descriptions.append(describe(index, role, table_digest=digest, **changes))
        one = self.descriptions[index]
        number = sum(entry.role is role for entry in self.all)
        entry = ExpectedInstance(
            index, f"{role}-{number}", role, f"{one.host}:{one.port}", one.server_ip, one.device_ids
        )
        self.all.append(entry)
        self.expected = self.all
        if boot:
            self.boot(index)
        return entry

    def use(self, *entries: ExpectedInstance, digest: str = NEW_DIGEST) -> None:
        """Give the registry a table of these instances."""
        self.control.registry.change(entries, digest)

    @property
    def states(self) -> dict[str, str]:
        """States by name, including draining instances."""
        return {one.name: one.state for one in self.control.view().instances}

    async def ask(self, **params: Any) -> Answer:
        """Run one request."""
        return await collect(self.control.dispatch, request(PROMPT, **params))

    async def ended(self, instance: SimulatedInstance) -> None:
        """Return when an instance has no session."""
        await until(lambda: not instance.sessions)


@virtual
async def test_an_instance_that_is_added_is_used() -> None:
    async with LiveCluster("PD").serving() as cluster:
        prefill, decode = cluster.all
        added = cluster.add(Role.DECODE)

        cluster.use(prefill, decode, added)
        await until(lambda: not cluster.control.registry.missing())
        answers = await asyncio.gather(*(cluster.ask(max_tokens=8) for _ in range(4)))

        assert {answer.done[0].decode_instance for answer in answers} == {"decode-1", "decode-2"}
        assert all(answer.tokens[0, 0] == expected(PROMPT, 8) for answer in answers)
        assert cluster.control.view().table.version == 2
        assert cluster.control.view().table.digest == NEW_DIGEST


@virtual
async def test_an_added_instance_not_yet_up_delays_nothing() -> None:
    async with LiveCluster("PD").serving() as cluster:
        added = cluster.add(Role.DECODE, boot=False)
        cluster.use(*cluster.all[:2], added)

        assert (await cluster.ask()).finishes
        assert cluster.states["decode-1"] == "connecting"
        cluster.boot(2)
        await until(lambda: cluster.states["decode-1"] == "living")


@virtual
async def test_a_removed_instance_finishes_its_work_and_is_released() -> None:
    async with LiveCluster("PDD").serving() as cluster:
        prefill, _, second = cluster.all
        long = [asyncio.create_task(cluster.ask(max_tokens=200)) for _ in range(4)]
        await until(lambda: cluster.instances[1].prompts and cluster.instances[2].prompts)

        cluster.use(prefill, second)
        assert cluster.states["decode-0"] == "draining"
        later = await asyncio.gather(*(cluster.ask() for _ in range(4)))
        answers = await asyncio.gather(*long)

        assert {answer.done[0].decode_instance for answer in later} == {"decode-2"}
        assert {answer.done[0].decode_instance for answer in answers} == {"decode-1", "decode-2"}
        assert all(answer.tokens[0, 0] == expected(PROMPT, 200) for answer in answers)
        assert cluster.control.dispatch.ledger.retried_prompts == 0
        await cluster.ended(cluster.instances[1])
        await until(lambda: "decode-0" not in cluster.states)
        assert cluster.control.registry.living()[-1].description.instance_id == "decode-2"


@virtual
async def test_queued_requests_go_to_the_remaining_instances() -> None:
    async with LiveCluster("PDD", max_num_seqs=1).serving() as cluster:
        prefill, _, second = cluster.all
        tasks = [asyncio.create_task(cluster.ask(max_tokens=20)) for _ in range(6)]
        await until(lambda: cluster.control.dispatch.admission.num_waiting)

        cluster.use(prefill, second)
        answers = await asyncio.gather(*tasks)

        assert all(answer.tokens[0, 0] == expected(PROMPT, 20) for answer in answers)
        assert [answer.done[0].decode_instance for answer in answers].count("decode-1") == 1


@virtual
async def test_a_granted_prompt_that_has_not_begun_is_waited_for() -> None:
    async with LiveCluster("PDD").serving() as cluster:
        prefill, first, second = cluster.all
        running = Running(cluster.control.dispatch, request(PROMPT, PROMPT))
        await asyncio.sleep(0)  # both are granted, their tasks have not run

        cluster.use(prefill, second)
        await running.task

        assert {done.decode_instance for done in running.done.values()} == {"decode-1", "decode-2"}
        assert cluster.control.dispatch.ledger.retried_prompts == 0
        assert first.name == "decode-0"


@virtual
async def test_unfinished_work_continues_elsewhere_from_its_tokens() -> None:
    async with LiveCluster("PDD", limits=ControlLimits(drain_s=0.5)).serving() as cluster:
        prefill, _, second = cluster.all
        for instance in cluster.instances:
            instance.behaviour.step_s = 0.1
        task = asyncio.create_task(cluster.ask(max_tokens=60))
        await until(lambda: cluster.instances[1].prompts)

        cluster.use(prefill, second)
        answer = await task

        assert answer.tokens[0, 0] == expected(PROMPT, 60)
        assert answer.done[0].decode_instance == "decode-2"
        assert cluster.control.dispatch.ledger.retried_prompts == 1


@virtual
async def test_requests_wait_for_the_replacements_of_all_instances() -> None:
    async with LiveCluster("PD").serving() as cluster:
        prefill, _ = cluster.all
        added = cluster.add(Role.DECODE, boot=False)
        before = asyncio.create_task(cluster.ask(max_tokens=100))
        await until(lambda: cluster.instances[1].prompts)

        cluster.use(prefill, added)
        later = asyncio.create_task(cluster.ask())
        await asyncio.sleep(5.0)
        assert not later.done()
        cluster.boot(2)

        assert (await later).done[0].decode_instance == "decode-2"
        assert (await before).done[0].decode_instance == "decode-1"
        assert cluster.control.dispatch.ledger.retried_prompts == 0


@virtual
async def test_requests_do_not_wait_forever_for_a_missing_instance() -> None:
    async with LiveCluster("PD").serving() as cluster:
        cluster.use(cluster.all[0], cluster.add(Role.DECODE, boot=False))
        loop = asyncio.get_running_loop()
        began = loop.time()

        with pytest.raises(Unavailable, match="no path can serve this now; missing: decode-1"):
            await cluster.ask()
        assert 9.0 < loop.time() - began < 12.0
        with pytest.raises(Unavailable, match="missing: decode-1"):
            await cluster.ask()


@virtual
async def test_a_removed_prefill_instance_drains_too() -> None:
    async with LiveCluster("PPD").serving() as cluster:
        first, second, decode = cluster.all
        tasks = [asyncio.create_task(cluster.ask(max_tokens=40)) for _ in range(4)]
        await until(lambda: cluster.instances[0].commands)

        cluster.use(second, decode)
        answers = await asyncio.gather(*tasks)

        assert all(answer.tokens[0, 0] == expected(PROMPT, 40) for answer in answers)
        assert (await cluster.ask()).done[0].prefill_instance == "prefill-1"
        await until(lambda: first.name not in cluster.states)


@virtual
async def test_an_instance_returning_while_it_drains_stays() -> None:
    async with LiveCluster("PDD").serving() as cluster:
        cluster.instances[1].behaviour.step_s = 0.1
        task = asyncio.create_task(cluster.ask(max_tokens=50))
        await until(lambda: cluster.instances[1].prompts)
        (session,) = cluster.instances[1].sessions

        cluster.use(cluster.all[0], cluster.all[2])
        await asyncio.sleep(1.0)
        cluster.use(*cluster.all)

        assert cluster.states["decode-0"] == "living"
        await task
        await asyncio.sleep(5.0)
        assert cluster.instances[1].sessions == [session]
        assert cluster.control.view().table.version == 3


@virtual
async def test_a_returning_instance_is_reconnected_under_its_name() -> None:
    async with LiveCluster("PDD").serving() as cluster:
        cluster.use(cluster.all[0], cluster.all[2])
        await until(lambda: "decode-0" not in cluster.states)
        await cluster.ended(cluster.instances[1])

        cluster.use(*cluster.all)
        await until(lambda: cluster.states.get("decode-0") == "living")

        assert not cluster.control.registry.missing()


@virtual
async def test_an_instance_returning_while_its_session_closes_reconnects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with LiveCluster("PDD").serving() as cluster:
        closing, close = asyncio.Event(), FakeSession.close

        async def slowly(session: FakeSession) -> None:
            closing.set()
            await asyncio.sleep(2.0)
            await close(session)

        monkeypatch.setattr(FakeSession, "close", slowly)
        cluster.use(cluster.all[0], cluster.all[2])
        await closing.wait()
        before = list(cluster.instances[1].sessions)

        cluster.use(*cluster.all)
        await until(lambda: cluster.instances[1].sessions not in (before, []))

        await until(lambda: not cluster.control.registry.missing())
        await asyncio.sleep(5.0)
        assert not cluster.control.registry.missing()


@virtual
async def test_a_role_change_does_not_end_its_own_new_session() -> None:
    async with LiveCluster("PDD").serving() as cluster:
        prefill, first, second = cluster.all
        cluster.instances[1].behaviour.step_s = 0.1
        task = asyncio.create_task(cluster.ask(max_tokens=50))
        await until(lambda: cluster.instances[1].prompts)

        changed = dataclasses.replace(first, index=7, name="prefill-1", role=Role.PREFILL)
        cluster.use(prefill, changed, second)
        answer = await task

        assert answer.tokens[0, 0] == expected(PROMPT, 50)
        assert cluster.control.dispatch.ledger.retried_prompts == 0
        await until(lambda: cluster.states == {"prefill-0": "living", "prefill-1": "living", "decode-1": "living"})


@virtual
async def test_a_removed_instance_that_never_answered_leaves_at_once() -> None:
    async with LiveCluster("PD").serving() as cluster:
        added = cluster.add(Role.DECODE, boot=False)
        cluster.use(*cluster.all[:2], added)
        await asyncio.sleep(1.0)

        cluster.use(*cluster.all[:2])
        await until(lambda: "decode-1" not in cluster.states)
        dials = len(cluster.network.dials)
        await asyncio.sleep(30.0)

        assert cluster.network.dials[dials:] == []


@virtual
async def test_an_instance_that_dies_while_draining_is_not_waited_for() -> None:
    async with LiveCluster("PDD").serving() as cluster:
        cluster.instances[1].behaviour.step_s = 0.1
        task = asyncio.create_task(cluster.ask(max_tokens=50))
        await until(lambda: cluster.instances[1].prompts)

        cluster.use(cluster.all[0], cluster.all[2])
        cluster.kill(1)
        answer = await task

        assert answer.tokens[0, 0] == expected(PROMPT, 50)
        await until(lambda: "decode-0" not in cluster.states)


@virtual
async def test_no_probe_goes_to_a_removed_instance() -> None:
    async with LiveCluster("PDD", probes=True).serving() as cluster:
        await until(lambda: cluster.control.ready())
        cluster.use(cluster.all[0], cluster.all[2])
        await cluster.ended(cluster.instances[1])
        commands = len(cluster.instances[1].commands)

        await asyncio.sleep(60.0)

        assert len(cluster.instances[1].commands) == commands
        assert cluster.control.ready()


@virtual
async def test_a_table_may_reach_an_instance_before_or_after_the_scheduler() -> None:
    async with LiveCluster("PD").serving() as cluster:
        await cluster.ask()
        newer = cluster.add(Role.DECODE, digest="one not seen here")
        older = cluster.add(Role.DECODE, digest=TABLE_DIGEST)

        cluster.use(*cluster.all[:2], newer, older)

        await until(lambda: not cluster.control.registry.missing())


@virtual
async def test_at_startup_an_instance_may_have_any_table_in_use_so_far() -> None:
    cluster = LiveCluster("PD")
    cluster.boot(0, table_digest=TABLE_DIGEST)
    cluster.boot(1, table_digest=NEW_DIGEST)
    cluster.use(*cluster.all)
    running = asyncio.create_task(cluster.control.registry.run())

    await cluster.control.registry.wait_path(5.0)

    assert not cluster.control.registry.missing()
    running.cancel()


@virtual
async def test_a_table_changing_during_the_start_is_accepted() -> None:
    cluster = LiveCluster("PD")
    for index in range(2):
        cluster.boot(index, table_digest=NEW_DIGEST)  # the instances have seen it first
    running = asyncio.create_task(cluster.control.run())
    await asyncio.sleep(2.0)
    assert not running.done()
    assert "another global table" in str(cluster.control.registry.missing()[0])

    cluster.use(*cluster.all)
    await cluster.control.registry.wait_path(5.0)

    assert not cluster.control.registry.missing()
    running.cancel()


@virtual
async def test_a_table_may_replace_all_instances_by_others() -> None:
    async with LiveCluster("PD").serving() as cluster:
        before = tuple(cluster.all)
        cluster.use()
        await until(lambda: not cluster.states)
        await asyncio.sleep(1.0)

        cluster.use(*before)
        await until(lambda: cluster.states == {"prefill-0": "living", "decode-0": "living"})

        assert (await cluster.ask()).finishes


@virtual
async def test_the_reference_description_outlives_its_instance() -> None:
    async with LiveCluster("PD").serving() as cluster:
        await cluster.ask()
        others = cluster.add(Role.PREFILL), cluster.add(Role.DECODE)
        cluster.use(*others)
        await until(lambda: [*cluster.states] == ["prefill-1", "decode-1"])
        other = ModelIdentity("other", "cccc", "dddd")

        cluster.use(*others, cluster.add(Role.DECODE, model=other))
        await until(lambda: cluster.states["decode-2"] == "refused")

        assert (await cluster.ask()).done[0].decode_instance == "decode-3"


@virtual
async def test_a_new_instance_is_compared_with_the_last_to_leave() -> None:
    async with LiveCluster("PD").serving() as cluster:
        await cluster.ask()
        cluster.use()
        await until(lambda: not cluster.states)

        cluster.use(cluster.add(Role.COMBINED, model=ModelIdentity("other", "cccc", "dddd")))

        await until(lambda: cluster.states == {"combined-0": "refused"})
        assert "(tiny)" in cluster.control.view().instances[0].why
