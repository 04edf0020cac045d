"""A prompt is handed from a prefill to a decode instance, and every finish leaves both pools empty."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from testing.engine.fake_model import FakeConfig, expected_tokens
from testing.instance.fake_engine import fake_model
from tests.instance.pair import DEADLINE_S, FAKE, Client, instance_config, running
from wire.messages import Cancel, Failed, Generate, HandedOff, Prefill, Refused, Reserve, Reserved, Step
from wire.types import FinishReason, PromptState, Role, SamplingParams, TokenOutput

PROMPT = tuple(range(3, 53))


@contextlib.asynccontextmanager
async def pair(folder: Path, **decode_options: object) -> AsyncIterator[tuple[Client, Client]]:
    prefill = instance_config(folder, Role.PREFILL, port=4)
    decode = instance_config(folder, Role.DECODE, port=6, **decode_options)
    async with running(prefill) as (_, p), running(decode) as (_, d):
        yield p, d


async def hand_off(p: Client, d: Client, state: PromptState) -> list[TokenOutput]:
    """Run a prompt over the pair; return its tokens in the order they came from P, then from D."""
    await d.session.send(Reserve(state))
    reserved = await d.next(Reserved, Refused)
    assert isinstance(reserved, Reserved)
    await p.session.send(Prefill(state, reserved.ticket))
    tokens: list[TokenOutput] = []
    event = await p.next(Step, Failed)
    assert isinstance(event, Step)
    tokens.extend(event.tokens)
    assert isinstance(await p.next(HandedOff, Failed), HandedOff)
    while sum(token.finish is not None for token in tokens) < state.params.n:
        event = await d.next(Step, Failed)
        assert isinstance(event, Step), event
        tokens.extend(event.tokens)
    return tokens


async def wait_empty(*clients: Client) -> None:
    """Wait until heartbeats report that no block is held."""
    from wire.messages import Heartbeat

    for client in clients:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                beat = await client.next(Heartbeat)
                assert isinstance(beat, Heartbeat)
                assert beat.load is not None
                if beat.load.blocks_used == 0:
                    break


def salt(folder: Path, role: Role, port: int) -> int:
    model = fake_model(instance_config(folder, role, port=port))
    config: FakeConfig = model._config  # type: ignore[attr-defined]
    model.close()
    return config.salt


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("block_size", [16, 128])
def test_tokens_prove_which_instance_prefilled_and_which_decoded(
    tmp_path: Path, transport: str, block_size: int
) -> None:
    async def run() -> list[TokenOutput]:
        async with pair(tmp_path, kv_transport=(transport,), block_size=block_size) as (p, d):
            tokens = await hand_off(p, d, state)
            await wait_empty(p, d)
            return tokens

    state = PromptState("r/0", "r", PROMPT, SamplingParams(max_tokens=12, temperature=0.0))

    tokens = asyncio.run(run())

    fake = FakeConfig(**FAKE)  # type: ignore[arg-type]
    salts = [salt(tmp_path, Role.PREFILL, 4)] * len(PROMPT) + [salt(tmp_path, Role.DECODE, 6)]
    assert tuple(t.token_id for t in tokens) == expected_tokens(fake, PROMPT, state.params, count=12, salts=salts)
    assert [t.index for t in tokens] == list(range(12))
    assert tokens[-1].finish is FinishReason.LENGTH


def test_a_decode_instance_running_ahead_answers_the_same(tmp_path: Path) -> None:
    """Several prompts at once, of which one finishes by a stop id and one is cancelled during its hand-off."""
    (tmp_path / "ahead").mkdir()
    prefill = instance_config(tmp_path, Role.PREFILL, port=4)
    decode = instance_config(tmp_path / "ahead", Role.DECODE, port=6)
    (tmp_path / "ahead" / "fake.json").write_text(json.dumps({**FAKE, "runs_ahead": True}))
    fake = FakeConfig(**FAKE)  # type: ignore[arg-type]
    salts = [salt(tmp_path, Role.PREFILL, 4)] * len(PROMPT) + [salt(tmp_path, Role.DECODE, 6)]
    plain = SamplingParams(max_tokens=12, temperature=0.0)
    whole = expected_tokens(fake, PROMPT, plain, count=12, salts=salts)
    stops = SamplingParams(max_tokens=12, temperature=0.0, stop_token_ids=(whole[5],))
    assert whole[5] not in whole[:5]

    async def run() -> list[list[TokenOutput]]:
        async with running(prefill) as (_, p), running(decode) as (instance, d):
            assert instance._host.engine.runs_ahead  # type: ignore[attr-defined]
            answers = [
                await hand_off(p, d, PromptState(f"r/{i}", "r", PROMPT, one)) for i, one in enumerate((plain, stops))
            ]
            long = PromptState("long", "r", PROMPT, SamplingParams(max_tokens=180, temperature=0.0))
            await d.session.send(Generate(long))
            await d.next(Step)
            await d.session.send(Cancel("long"))
            await wait_empty(p, d)
            return answers

    answers = asyncio.run(run())

    assert tuple(token.token_id for token in answers[0]) == whole
    assert tuple(token.token_id for token in answers[1]) == whole[:6]
    assert [answer[-1].finish for answer in answers] == [FinishReason.LENGTH, FinishReason.STOP]


def test_sequences_of_one_prompt_are_sent_once_and_differ(tmp_path: Path) -> None:
    async def run() -> list[TokenOutput]:
        async with pair(tmp_path) as (p, d):
            tokens = await hand_off(p, d, state)
            await wait_empty(p, d)
            return tokens

    state = PromptState("r/0", "r", PROMPT, SamplingParams(max_tokens=6, temperature=1.0, seed=7, n=3))

    tokens = asyncio.run(run())

    by_sequence = [[t.token_id for t in tokens if t.sequence == i] for i in range(3)]
    assert [len(sequence) for sequence in by_sequence] == [6, 6, 6]
    assert by_sequence[0] != by_sequence[1]


def test_a_prompt_finished_by_its_first_token_never_reaches_decode(tmp_path: Path) -> None:
    async def run() -> None:
        async with pair(tmp_path) as (p, d):
            await hand_off(p, d, state)
            assert isinstance(await d.next(Failed), Failed)
            await wait_empty(p, d)

    state = PromptState("r/0", "r", PROMPT, SamplingParams(max_tokens=1, temperature=0.0))

    asyncio.run(run())


def test_a_whole_prompt_on_one_instance_equals_its_reference(tmp_path: Path) -> None:
    async def run() -> list[int | None]:
        async with running(instance_config(tmp_path, Role.COMBINED, port=4)) as (_, client):
            await client.session.send(Generate(state))
            tokens: list[TokenOutput] = []
            while not tokens or tokens[-1].finish is None:
                event = await client.next(Step, Failed)
                assert isinstance(event, Step)
                tokens.extend(event.tokens)
            await wait_empty(client)
            return [token.token_id for token in tokens]

    state = PromptState("r/0", "r", PROMPT, SamplingParams(max_tokens=9, temperature=0.0))

    tokens = asyncio.run(run())

    fake, salts = FakeConfig(**FAKE), [salt(tmp_path, Role.COMBINED, 4)]  # type: ignore[arg-type]
    assert tuple(tokens) == expected_tokens(fake, PROMPT, state.params, count=9, salts=salts)


def test_cancel_after_reserve_frees_the_blocks(tmp_path: Path) -> None:
    async def run() -> None:
        async with pair(tmp_path) as (_, d):
            await d.session.send(Reserve(PromptState("r/0", "r", PROMPT, SamplingParams(max_tokens=2))))
            await d.next(Reserved)
            await d.session.send(Cancel("r/0"))
            failed = await d.next(Failed)
            assert isinstance(failed, Failed)
            assert failed.error == "Cancelled"
            await wait_empty(d)

    asyncio.run(run())


def test_cancelling_a_running_prompt_returns_its_finishes(tmp_path: Path) -> None:
    async def run() -> None:
        config = instance_config(tmp_path, Role.COMBINED, port=4)
        (tmp_path / "fake.json").write_text(json.dumps({**FAKE, "step_seconds": 0.01}))
        async with running(config) as (_, client):
            await client.session.send(Generate(state))
            await client.next(Step)
            await client.session.send(Cancel("r/0", 1))
            await client.session.send(Cancel("r/0"))
            endings: dict[int, FinishReason] = {}
            while len(endings) < 2:
                event = await client.next(Step)
                assert isinstance(event, Step)
                endings |= {t.sequence: t.finish for t in event.tokens if t.finish is not None}
            assert endings == {0: FinishReason.CANCELLED, 1: FinishReason.CANCELLED}
            await wait_empty(client)

    state = PromptState("r/0", "r", PROMPT, SamplingParams(max_tokens=200, temperature=1.0, n=2))

    asyncio.run(run())


def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers(tmp_path: Path) -> None:
    async def run() -> Refused:
        small = instance_config(tmp_path, Role.COMBINED, port=4, kv_cache_memory=16 * 1024)
        async with running(small) as (_, client):
            await client.session.send(Generate(state))
            refused = await client.next(Refused, Step)
            assert isinstance(refused, Refused)
            return refused

    state = PromptState("r/0", "r", PROMPT, SamplingParams(max_tokens=200, temperature=0.0))

    refused = asyncio.run(run())

    assert refused.error == "NeverFits"
    assert "blocks" in refused.message


def test_a_lost_session_ends_its_work(tmp_path: Path) -> None:
    async def run() -> int:
        config = instance_config(tmp_path, Role.COMBINED, port=4)
        async with running(config) as (instance, client):
            await client.session.send(Generate(state))
            await client.next(Step)
            await client.session.close()
            async with asyncio.timeout(DEADLINE_S):
                while instance._host.load().blocks_used or instance._host.load().running:  # noqa: ASYNC110 - no event
                    await asyncio.sleep(0)
            return instance._host.load().running

    state = PromptState("r/0", "r", PROMPT, SamplingParams(max_tokens=200, temperature=0.0))

    assert asyncio.run(run()) == 0
