"""One contract for the real and the simulated instance: streams outlive the session of their scheduler, and move."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from instance.local import LocalInstance
from simulation.instance import SimulatedInstance
from tests.instance.pair import DEADLINE_S, FAKE, Client, instance_config
from tests.scheduler.fake_cluster import describe
from wire.connection import Connection
from wire.inprocess import InProcessConnection
from wire.messages import Adopt, Adopted, Cancel, Failed, Generate, OpenSession, Refused, SessionOpen, Step
from wire.types import FinishReason, PromptState, ResumableStream, Role, SamplingParams, TokenOutput

ID, TENANT, REQUEST = "5" * 32, "key-1", b"POST"
LONG = PromptState(
    "a/0", "r", (3, 4, 5), SamplingParams(max_tokens=100, temperature=0.0), stream=ResumableStream(ID, TENANT, REQUEST)
)
SHORT = replace(LONG, params=SamplingParams(max_tokens=3, temperature=0.0))
Reach = Callable[[Path], contextlib.AbstractAsyncContextManager[Connection]]


@contextlib.asynccontextmanager
async def real(folder: Path) -> AsyncIterator[Connection]:
    config = instance_config(folder, Role.COMBINED, port=4)
    (folder / "fake.json").write_text(json.dumps({**FAKE, "step_seconds": 0.01}))
    instance = await LocalInstance.start(config)
    try:
        yield instance.connection()
    finally:
        await instance.stop()


@contextlib.asynccontextmanager
async def simulated(_: Path) -> AsyncIterator[Connection]:
    yield InProcessConnection(SimulatedInstance(describe(0, Role.COMBINED), {}))


@pytest.fixture(params=[real, simulated])
def reach(request: pytest.FixtureRequest) -> Reach:
    chosen: Reach = request.param
    return chosen


def run(reach: Reach, folder: Path, test: Callable[[Connection], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), reach(folder) as connection:
            await test(connection)
            await freed(connection)

    asyncio.run(main())


@contextlib.asynccontextmanager
async def opened(connection: Connection, scheduler_id: str, *, orphan_s: float = 60.0) -> AsyncIterator[Client]:
    session = await connection.open(OpenSession(scheduler_id, 1, 10 * DEADLINE_S, orphan_s), DEADLINE_S)
    yield Client(session)
    await session.close()


async def tokens_of(client: Client, num_tokens: int = 0) -> list[TokenOutput]:
    """Return the tokens up to the end of the prompt, or at least so many."""
    tokens: list[TokenOutput] = []
    while not tokens or (tokens[-1].finish is None if num_tokens == 0 else len(tokens) < num_tokens):
        step = await client.next(Step, Failed)
        assert isinstance(step, Step), step
        tokens += step.tokens
    return tokens


async def blocks_used(client: Client) -> int:
    """Return the blocks in use, by the first load of a session that has just been opened."""
    opened_event = await client.next(SessionOpen)
    assert isinstance(opened_event, SessionOpen)
    return opened_event.load.blocks_used


async def adopt(client: Client, owner_epoch: int | None = None, *, tenant: str = TENANT) -> Adopted | Refused:
    await client.session.send(Adopt(ID, tenant, owner_epoch))
    answer = await client.next(Adopted, Refused)
    assert isinstance(answer, Adopted | Refused)
    assert answer.prompt_id == ID
    return answer


async def epoch_of(client: Client, owner_epoch: int | None = None) -> int | str:
    """Return the epoch under which it has adopted the stream, or the error."""
    answer = await adopt(client, owner_epoch)
    if isinstance(answer, Refused):
        return answer.error
    assert answer.prompt.stream is not None
    return answer.prompt.stream.owner_epoch


async def undisturbed(connection: Connection) -> list[TokenOutput]:
    async with opened(connection, "undisturbed") as client:
        await client.session.send(Generate(replace(LONG, stream=None)))
        return await tokens_of(client)


async def freed(connection: Connection) -> None:
    """Return when the blocks of the stream are free."""
    while True:
        async with opened(connection, "watch") as client:
            if await blocks_used(client) == 0:
                return
        await asyncio.sleep(0.01)


def test_an_orphan_runs_on_and_its_adopter_gets_every_token(reach: Reach, tmp_path: Path) -> None:
    async def test(connection: Connection) -> None:
        whole = await undisturbed(connection)
        async with opened(connection, "a") as first:
            await first.session.send(Generate(LONG))
            had = await tokens_of(first, 3)
        async with opened(connection, "b") as second:
            answer = await adopt(second)
            assert isinstance(answer, Adopted)
            assert answer.prompt == replace(LONG, stream=ResumableStream(ID, TENANT, REQUEST, 1))
            assert len(had) <= answer.num_sent < 100
            tokens = await tokens_of(second)
            assert tokens == whole
            assert tokens[: len(had)] == had
            await second.session.send(Cancel("a/0", owner_epoch=1))
            assert await epoch_of(second) == "UnknownStream"

    run(reach, tmp_path, test)


def test_an_adoption_is_reported_to_the_owner_before(reach: Reach, tmp_path: Path) -> None:
    async def test(connection: Connection) -> None:
        async with opened(connection, "a") as first, opened(connection, "b") as second:
            await first.session.send(Generate(LONG))
            await tokens_of(first, 3)
            assert await epoch_of(second) == 1
            failed = await first.next(Failed)
            assert isinstance(failed, Failed)
            assert (failed.prompt_id, failed.error) == ("a/0", "StreamMoved")
            await first.session.send(Cancel("a/0"), Cancel("a/0", owner_epoch=1), Cancel("a/0", 0, owner_epoch=1))
            assert await epoch_of(first, 0) == "StreamMoved"
            assert len(await tokens_of(second)) == 100
            await second.session.send(Cancel("a/0", owner_epoch=1))

    run(reach, tmp_path, test)


def test_a_cancel_of_the_epoch_before_is_refused_in_one_session(reach: Reach, tmp_path: Path) -> None:
    async def test(connection: Connection) -> None:
        async with opened(connection, "a") as client:
            await client.session.send(Generate(LONG))
            await tokens_of(client, 3)
            await client.session.send(Adopt(ID, TENANT), Cancel("a/0"), Cancel("a/0", 0))
            assert isinstance(await client.next(Failed), Failed)
            assert isinstance(await client.next(Adopted), Adopted)
            assert len(await tokens_of(client)) == 100
            await client.session.send(Cancel("a/0", owner_epoch=1))

    run(reach, tmp_path, test)


@pytest.mark.parametrize("adopted_from", [None, 0])
def test_a_scheduler_gets_its_own_orphan_back(reach: Reach, tmp_path: Path, adopted_from: int | None) -> None:
    async def test(connection: Connection) -> None:
        async with opened(connection, "a") as client:
            await client.session.send(Generate(LONG))
            await tokens_of(client, 3)
        async with opened(connection, "a") as client:
            assert await epoch_of(client, adopted_from) == 1
            assert len(await tokens_of(client)) == 100
            await client.session.send(Cancel("a/0", owner_epoch=1))

    run(reach, tmp_path, test)


def test_only_the_same_key_may_adopt(reach: Reach, tmp_path: Path) -> None:
    async def test(connection: Connection) -> None:
        async with opened(connection, "a") as first, opened(connection, "b") as second:
            await first.session.send(Generate(LONG))
            await tokens_of(first, 3)
            refused = await adopt(second, tenant="key-2")
            assert isinstance(refused, Refused)
            assert refused.error == "UnknownStream"
            assert len(await tokens_of(first)) == 97
            await first.session.send(Cancel("a/0"))

    run(reach, tmp_path, test)


def test_a_finished_stream_is_kept_until_it_is_released(reach: Reach, tmp_path: Path) -> None:
    async def test(connection: Connection) -> None:
        async with opened(connection, "a") as first:
            await first.session.send(Generate(SHORT))
            whole = await tokens_of(first)
        await freed(connection)
        async with opened(connection, "b") as second:
            assert await epoch_of(second) == 1
            assert await tokens_of(second) == whole
            assert whole[-1].finish is FinishReason.LENGTH
            await second.session.send(Cancel("a/0", owner_epoch=1))
            assert await epoch_of(second) == "UnknownStream"

    run(reach, tmp_path, test)


def test_a_stopped_sequence_is_kept_until_it_is_released(reach: Reach, tmp_path: Path) -> None:
    async def test(connection: Connection) -> None:
        async with opened(connection, "a") as first:
            await first.session.send(Generate(LONG))
            await tokens_of(first, 3)
            await first.session.send(Cancel("a/0", 0))
            await tokens_of(first)
            await freed(connection)
            assert await epoch_of(first) == 1
            assert (await tokens_of(first))[-1].finish is FinishReason.CANCELLED
            await first.session.send(Cancel("a/0", owner_epoch=1))

    run(reach, tmp_path, test)


def test_an_orphan_that_nobody_adopts_is_freed_at_the_limit(reach: Reach, tmp_path: Path) -> None:
    async def test(connection: Connection) -> None:
        async with opened(connection, "a", orphan_s=0.2) as first:
            await first.session.send(Generate(LONG))
            await tokens_of(first, 3)
        await freed(connection)
        async with opened(connection, "b") as second:
            assert await epoch_of(second) == "UnknownStream"

    run(reach, tmp_path, test)


def test_an_orphan_is_freed_at_the_limit_of_tokens(
    reach: Reach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wire.kept_stream.ORPHAN_TOKENS", 5)

    async def test(connection: Connection) -> None:
        async with opened(connection, "a") as first:
            await first.session.send(Generate(LONG))
            await tokens_of(first, 20)
        await freed(connection)
        async with opened(connection, "b") as second:
            assert await epoch_of(second) == "UnknownStream"

    run(reach, tmp_path, test)


@pytest.mark.parametrize("state", [replace(LONG, stream=None), replace(LONG, token_ids=tuple(range(3, 100)))])
def test_what_no_client_can_resume_ends_with_its_session(reach: Reach, tmp_path: Path, state: PromptState) -> None:
    async def test(connection: Connection) -> None:
        async with opened(connection, "a", orphan_s=60.0 if state.stream is None else 0.0) as first:
            await first.session.send(Generate(state))
            await tokens_of(first, 3)
        await freed(connection)

    run(reach, tmp_path, test)


def test_a_stream_without_output_ends_with_its_session(reach: Reach, tmp_path: Path) -> None:
    async def test(connection: Connection) -> None:
        async with opened(connection, "a") as first:
            await first.session.send(Generate(LONG))
        await freed(connection)

    run(reach, tmp_path, test)


def test_a_key_has_a_limit_of_kept_bytes(reach: Reach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wire.kept_stream.MAX_KEPT_BYTES", 512)  # two tokens
    finished = replace(SHORT, prompt_id="a/1", stream=ResumableStream("6" * 32, TENANT, REQUEST))
    one_too_many = replace(LONG, prompt_id="a/2", stream=ResumableStream("7" * 32, TENANT, REQUEST))
    of_another_key = replace(LONG, prompt_id="a/3", stream=ResumableStream("8" * 32, "key-2", REQUEST))

    async def adopted(client: Client, stream_id: str, tenant: str = TENANT) -> bool:
        await client.session.send(Adopt(stream_id, tenant))
        return isinstance(await client.next(Adopted, Refused), Adopted)

    async def test(connection: Connection) -> None:
        async with opened(connection, "a") as first, opened(connection, "b") as second:
            await first.session.send(Generate(finished))
            await tokens_of(first)
            await first.session.send(Generate(LONG))
            await tokens_of(first, 3)
            await first.session.send(Generate(one_too_many), Generate(of_another_key))
            await tokens_of(first, 10)
            found = [await adopted(second, digit * 32) for digit in "567"]
            assert found == [True, False, False]
            assert await adopted(second, "8" * 32, "key-2")
            await second.session.send(Cancel("a/0", owner_epoch=1), Cancel("a/3", owner_epoch=1))
            await first.session.send(Cancel("a/1"), Cancel("a/2"))

    run(reach, tmp_path, test)
