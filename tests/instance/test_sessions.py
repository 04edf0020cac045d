"""An instance has a session with each of several schedulers, and each sees only its own prompts."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from instance.local import LocalInstance
from tests.instance.pair import DEADLINE_S, FAKE, Client, instance_config, running
from wire.errors import Incompatible, InstanceLost
from wire.messages import Cancel, Failed, Generate, Heartbeat, OpenSession, RoleHeld, SetRole, Step
from wire.shared_limits import MAX_SCHEDULERS
from wire.types import FinishReason, PromptState, Role, SamplingParams

LONG = PromptState("a/0", "r", (3, 4, 5), SamplingParams(max_tokens=200, temperature=0.0))
SHORT = replace(LONG, prompt_id="b/0", params=SamplingParams(max_tokens=3, temperature=0.0))


@contextlib.asynccontextmanager
async def opened(instance: LocalInstance, scheduler_id: str, *, epoch: int = 1) -> AsyncIterator[Client]:
    session = await instance.connection().open(OpenSession(scheduler_id, epoch, 10 * DEADLINE_S), DEADLINE_S)
    yield Client(session)
    await session.close()


def run_shared(tmp_path: Path, test: Callable[[LocalInstance, Client, Client], Awaitable[None]]) -> None:
    """Run a test with a slow instance and the sessions of two schedulers."""

    async def run() -> None:
        config = instance_config(tmp_path, Role.COMBINED, port=4)
        (tmp_path / "fake.json").write_text(json.dumps({**FAKE, "step_seconds": 0.01}))
        async with running(config) as (instance, first), opened(instance, "second") as second:
            await test(instance, first, second)

    asyncio.run(run())


async def first_token(client: Client) -> Step:
    while True:
        step = await client.next(Step)
        assert isinstance(step, Step)
        if step.tokens:
            return step


async def rest(client: Client) -> list[Step]:
    """Return the steps up to the end of a prompt."""
    steps: list[Step] = []
    while True:
        step = await client.next(Step, Failed)
        assert isinstance(step, Step)
        steps.append(step)
        if any(token.finish is not None for token in step.tokens):
            return steps


def prompts_of(steps: list[Step]) -> set[str]:
    tokens = {token.prompt_id for step in steps for token in step.tokens}
    return tokens | {prompt_id for step in steps for prompt_id, _ in step.times}


def test_each_session_gets_the_events_of_its_own_prompts(tmp_path: Path) -> None:
    async def test(instance: LocalInstance, first: Client, second: Client) -> None:
        await first.session.send(Generate(LONG))
        before = await first_token(first)
        await second.session.send(Generate(SHORT))
        short = await rest(second)
        long = [before, *await rest(first)]

        assert (prompts_of(short), prompts_of(long)) == ({"b/0"}, {"a/0"})
        assert sum(len(step.tokens) for step in long) == 200
        both = [step.load.running for step in short if step.load is not None]
        assert max(both) == 2, "a load counts the prompts of all"

    run_shared(tmp_path, test)


def test_a_session_cannot_cancel_anothers_prompt(tmp_path: Path) -> None:
    async def test(instance: LocalInstance, first: Client, second: Client) -> None:
        await first.session.send(Generate(LONG))
        await first_token(first)
        await second.session.send(Cancel("a/0"), Generate(SHORT))
        await rest(second)
        *_, last = await rest(first)

        assert last.tokens[-1].finish is FinishReason.LENGTH

    run_shared(tmp_path, test)


def test_the_end_of_a_session_frees_only_its_own_blocks(tmp_path: Path) -> None:
    async def test(instance: LocalInstance, first: Client, second: Client) -> None:
        await first.session.send(Generate(LONG))
        await first_token(first)
        alone = instance._host.load().blocks_used
        await second.session.send(Generate(replace(LONG, prompt_id="b/0", token_ids=tuple(range(3, 50)))))
        await first_token(second)
        assert instance._host.load().blocks_used > alone + 1
        await second.session.close()
        while True:  # the load that reports its blocks free comes at once, the next heartbeat a second later
            beat = await first.next(Heartbeat)
            assert isinstance(beat, Heartbeat)
            assert beat.load is not None
            if beat.load.running == 1:
                break
        *_, last = await rest(first)

        assert last.tokens[-1].finish is FinishReason.LENGTH
        assert last.tokens[-1].index == 199

    run_shared(tmp_path, test)


def test_blocks_that_get_free_are_reported_to_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instance.host.HEARTBEAT_S", 10 * DEADLINE_S)

    async def test(instance: LocalInstance, first: Client, second: Client) -> None:
        await second.session.send(Generate(SHORT))
        await rest(second)
        beat = await first.next(Heartbeat)

        assert isinstance(beat, Heartbeat)
        assert beat.load is not None
        assert (beat.load.running, beat.load.steps > 0) == (0, True)

    run_shared(tmp_path, test)


def test_a_newer_epoch_ends_only_its_own_schedulers_session(tmp_path: Path) -> None:
    async def test(instance: LocalInstance, first: Client, second: Client) -> None:
        await first.session.send(Generate(LONG))
        await first_token(first)
        async with opened(instance, "second", epoch=2):
            with pytest.raises(InstanceLost):
                await second.next(Failed)
            with pytest.raises(Incompatible, match="session epoch 1 is older than the open session's, 2"):
                async with opened(instance, "second", epoch=1):
                    pass
            assert len(prompts_of(await rest(first))) == 1

    run_shared(tmp_path, test)


def test_one_session_too_many_is_refused_with_the_limit(tmp_path: Path) -> None:
    async def test(instance: LocalInstance, first: Client, second: Client) -> None:
        async with contextlib.AsyncExitStack() as others:
            for number in range(MAX_SCHEDULERS - 2):
                last = await others.enter_async_context(opened(instance, f"s{number}"))
            with pytest.raises(Incompatible, match=rf"has sessions with 16 schedulers \(limit {MAX_SCHEDULERS}\)"):
                await others.enter_async_context(opened(instance, "one too many"))
            await last.session.close()
            await others.enter_async_context(opened(instance, "one too many"))

    run_shared(tmp_path, test)


def test_a_change_of_role_answers_only_the_scheduler_that_made_it(tmp_path: Path) -> None:
    async def test(instance: LocalInstance, first: Client, second: Client) -> None:
        for client in (first, second):
            assert await client.next(RoleHeld) == RoleHeld(Role.COMBINED, 0)
        await first.session.send(SetRole(Role.PREFILL, 1))
        assert await first.next(RoleHeld) == RoleHeld(Role.PREFILL, 1, 1)
        assert await second.next(RoleHeld) == RoleHeld(Role.PREFILL, 1), "it answers none of its own"
        await second.session.send(SetRole(Role.DECODE, 1), SetRole(Role.DECODE, 2))
        refused = await second.next(RoleHeld)
        assert isinstance(refused, RoleHeld)
        assert (refused.role, refused.answers, "is not above 1" in refused.error) == (Role.PREFILL, 1, True)
        assert await second.next(RoleHeld) == RoleHeld(Role.DECODE, 2, 2)
        assert await first.next(RoleHeld) == RoleHeld(Role.DECODE, 2)

    run_shared(tmp_path, test)
