"""A failing command affects its own prompt only: it is answered, and the session continues."""

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from instance.session import InstanceSession
from tests.instance.pair import DEADLINE_S, FAKE, Client, instance_config, running
from tests.rpc.reach import Reach, in_process, over_grpc
from wire.errors import InstanceLost
from wire.load import LoadSnapshot
from wire.messages import (
    Cancel,
    Command,
    Failed,
    Generate,
    Heartbeat,
    OpenSession,
    Prefill,
    Refused,
    Reserve,
    Reserved,
    SessionOpen,
    Step,
)
from wire.types import PromptState, Role, SamplingParams, Ticket

STATE = PromptState("r/0", "r", (3, 4, 5), SamplingParams(max_tokens=2, temperature=0.0))
TICKET = Ticket("0" * 32, 1, "decode-0", 3, 0, 10.0, ())


@pytest.mark.parametrize(
    ("command", "half", "verb"),
    [
        (Reserve(STATE), "decode", "reserve"),
        (Generate(STATE), "decode", "generate"),
        (Prefill(STATE, TICKET), "prefill", "accept"),
        (Cancel("r/0"), "prefill", "cancel"),
    ],
)
def test_a_command_that_raises_is_answered_and_the_next_is_served(
    command: Command, half: str, verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down(*_: object) -> None:
        raise ValueError("a defect")

    async def run() -> None:
        async with running(instance_config(tmp_path, Role.COMBINED, port=4)) as (instance, client):
            with monkeypatch.context() as broken:
                broken.setattr(getattr(instance._host.workers, half), verb, break_down)
                await client.session.send(command)
            if not isinstance(command, Cancel):  # which returns nothing for an unknown prompt
                failed = await client.next(Failed)
                assert isinstance(failed, Failed)
                assert (failed.prompt_id, failed.error) == ("r/0", "InternalError")
            await client.session.send(Reserve(replace(STATE, prompt_id="r/1")))
            await client.next(Reserved)

    asyncio.run(run())


@pytest.mark.parametrize("reach", [over_grpc, in_process])
def test_bad_parameters_are_refused_and_the_next_prompt_is_served(reach: Reach, tmp_path: Path) -> None:
    async def run() -> None:
        async with running(instance_config(tmp_path, Role.COMBINED, port=4)) as (instance, old):
            await old.session.close()
            async with reach(instance._host) as connection:
                client = Client(await connection.open(OpenSession("test", 1, DEADLINE_S), DEADLINE_S))
                await client.session.send(
                    Generate(replace(STATE, params=replace(STATE.params, repetition_penalty=-1.0)))
                )
                refused = await client.next(Refused, Failed)
                assert isinstance(refused, Refused)
                assert (refused.prompt_id, refused.error) == ("r/0", "InvalidRequest")
                await client.session.send(Generate(STATE))
                assert isinstance(await client.next(Step, Refused, Failed), Step)
                await client.session.close()

    asyncio.run(run())


def test_an_event_emitted_after_the_event_loop_closed_is_dropped() -> None:
    async def open_one() -> InstanceSession:
        return InstanceSession(OpenSession("s", 1, 1.0), None, lambda _: None, lambda *_: None)  # type: ignore[arg-type]

    session = asyncio.run(open_one())

    session.emit(Heartbeat())

    assert session._queue.empty()


def test_events_while_a_session_opens_follow_its_first_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with running(instance_config(tmp_path, Role.COMBINED, port=4)) as (instance, _):
            host, load = instance._host, instance._host.load

            def load_meanwhile() -> LoadSnapshot:
                telling = threading.Thread(target=host._sessions.emit, args=(Heartbeat(),))
                telling.start()
                telling.join(DEADLINE_S)
                return load()

            with monkeypatch.context() as patch:
                patch.setattr(host, "load", load_meanwhile)
                session = await instance.connection().open(OpenSession("test", 2, DEADLINE_S), DEADLINE_S)
            first = await anext(session.events())
            await session.close()

            assert isinstance(first, SessionOpen)

    asyncio.run(run())


def test_heartbeats_continue_after_one_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with running(instance_config(tmp_path, Role.COMBINED, port=4)) as (instance, client):
            load, broken = instance._host.load, asyncio.Event()

            def fail_once() -> object:
                monkeypatch.setattr(instance._host, "load", load)
                broken.set()
                raise RuntimeError("no figures")

            monkeypatch.setattr(instance._host, "load", fail_once)
            async with asyncio.timeout(DEADLINE_S):
                await broken.wait()
            await client.next(Heartbeat)

    asyncio.run(run())


def test_a_silent_scheduler_loses_its_session_and_its_work(tmp_path: Path) -> None:
    async def run() -> None:
        config = instance_config(tmp_path, Role.COMBINED, port=4)
        (tmp_path / "fake.json").write_text(json.dumps({**FAKE, "step_seconds": 0.1}))
        async with running(config) as (instance, _):
            silent = await instance.connection().open(OpenSession("test", 2, 0.2), DEADLINE_S)
            await silent.send(Generate(replace(STATE, params=SamplingParams(max_tokens=200, temperature=0.0))))
            async with asyncio.timeout(DEADLINE_S):
                with pytest.raises(InstanceLost):
                    async for _event in silent.events():
                        pass
                while instance._host.load().blocks_used:  # noqa: ASYNC110 - another thread's pool has no event
                    await asyncio.sleep(0)

    asyncio.run(run())
