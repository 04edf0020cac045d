"""Chats of several turns over a real pair: KV that the decode instance holds is neither computed nor sent again."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from engine.step import PendingStep, StepBatch
from testing.engine.fake_model import FakeConfig, FakeModel, expected_tokens
from tests.instance.pair import FAKE, Client, instance_config, running
from tests.instance.test_handoff import salt, wait_empty
from wire.messages import Cancel, Failed, Generate, HandedOff, Heartbeat, Prefill, Refused, Reserve, Reserved, Step
from wire.types import PromptState, Role, SamplingParams, StageTimes, Ticket

TOKEN_BYTES = 3 * 2 * 2 * 4 * 4  # layers, k and v, heads, head_dim, float32
PARAMS = SamplingParams(max_tokens=20, temperature=0.0)
FIRST = tuple(range(3, 43))


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt over the pair: its cost and its answer."""

    tokens: tuple[int, ...]
    ticket: Ticket
    times: StageTimes

    @property
    def tokens_sent(self) -> int:
        return self.times.kv_bytes // TOKEN_BYTES


@contextlib.contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, int]]:
    """Count the tokens that each fake computes, by its salt."""
    computed: dict[int, int] = {}
    launch: Callable[..., PendingStep] = FakeModel.launch

    def counted(model: FakeModel, batch: StepBatch, layer_done: Callable[[int], None] | None = None) -> PendingStep:
        own = model._config.salt
        computed[own] = computed.get(own, 0) + len(batch.token_ids)
        return launch(model, batch, layer_done)

    with monkeypatch.context() as patch:
        patch.setattr(FakeModel, "launch", counted)
        yield computed


@contextlib.asynccontextmanager
async def pair(folder: Path, **options: object) -> AsyncIterator[tuple[Client, Client]]:
    prefill = instance_config(folder, Role.PREFILL, port=4, **options)
    decode = instance_config(folder, Role.DECODE, port=6, **options)
    async with running(prefill) as (_, p), running(decode) as (_, d):
        yield p, d


def salts(folder: Path) -> tuple[int, int]:
    return salt(folder, Role.PREFILL, 4), salt(folder, Role.DECODE, 6)


def prompt(name: str, token_ids: tuple[int, ...], tenant: str = "") -> PromptState:
    return PromptState(name, name, token_ids, PARAMS, cache_salt=tenant)


async def reserve(d: Client, state: PromptState) -> Ticket:
    await d.session.send(Reserve(state))
    reserved = await d.next(Reserved, Refused)
    assert isinstance(reserved, Reserved), reserved
    return reserved.ticket


async def converse(p: Client, d: Client, state: PromptState) -> Turn:
    """Hand a prompt off and read its answer."""
    ticket = await reserve(d, state)
    await p.session.send(Prefill(state, ticket))
    step = await p.next(Step, Failed)
    assert isinstance(step, Step), step
    tokens = list(step.tokens)
    ending = await p.next(HandedOff, Failed)
    assert isinstance(ending, HandedOff), ending
    while tokens[-1].finish is None:
        step = await d.next(Step, Failed)
        assert isinstance(step, Step), step
        tokens.extend(step.tokens)
    return Turn(tuple(token.token_id for token in tokens if token.token_id is not None), ticket, ending.times)


def reference(state: PromptState, mine: list[int], decoder: int) -> tuple[int, ...]:
    fake = FakeConfig(**FAKE)  # type: ignore[arg-type]
    return expected_tokens(fake, state.token_ids, PARAMS, count=20, salts=[*mine, decoder])


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_three_turns_of_a_chat_compute_and_send_only_new_tokens(
    tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> tuple[list[Turn], list[dict[int, int]]]:
        turns, counts, token_ids = list[Turn](), list[dict[int, int]](), FIRST
        async with pair(tmp_path, kv_transport=(transport,)) as (p, d):
            for number in range(3):
                computed.clear()
                turns.append(await converse(p, d, prompt(f"r/{number}", token_ids)))
                counts.append(dict(computed))
                token_ids = (*token_ids, *turns[-1].tokens, *range(100 * number, 100 * number + 17))
            await wait_empty(p, d)
        return turns, counts

    with counting(monkeypatch) as computed:
        turns, counts = asyncio.run(run())
    p, d = salts(tmp_path)

    # Turns have 40, 77 and 114 tokens; D holds all but the last token of a turn's answer, in full blocks.
    assert [turn.ticket.first_token for turn in turns] == [0, 48, 96]
    assert [turn.tokens_sent for turn in turns] == [40, 77 - 48, 114 - 96]
    assert [turn.times.cached_tokens for turn in turns] == [0, 32, 64]
    assert [turn.times.written_tokens for turn in turns] == [32, 32, 48]
    assert [count[p] for count in counts] == [40, 77 - 32, 114 - 64]
    assert [count[d] for count in counts] == [19, 19, 19]
    # The first token depends on P's KV only, the others on what D held and what was sent: D's own KV is of its answers.
    held = {1: [p] * 40 + [d] * 8, 2: [p] * 40 + [d] * 8 + [p] * 29 + [d] * 19}
    ids = FIRST
    for number, turn in enumerate(turns):
        state = prompt("x", ids)
        mine = [p] * len(ids)
        assert turn.tokens[:1] == reference(state, mine, d)[:1]
        mine[: len(held.get(number, []))] = held.get(number, [])
        fed = replace(state, token_ids=(*ids, turn.tokens[0]))
        assert turn.tokens[1:] == reference(fed, [*mine, d], d)[:19]
        ids = (*ids, *turn.tokens, *range(100 * number, 100 * number + 17))


def test_without_reuse_decoded_the_next_turn_finds_the_prompt_only(tmp_path: Path) -> None:
    async def run() -> list[Turn]:
        async with pair(tmp_path, reuse_decoded=False) as (p, d):
            first = await converse(p, d, prompt("r/0", FIRST))
            turns = [first, await converse(p, d, prompt("r/1", (*FIRST, *first.tokens, *range(17))))]
            await wait_empty(p, d)
            return turns

    turns = asyncio.run(run())

    assert [turn.ticket.first_token for turn in turns] == [0, 32], "48 with the outputs"
    assert [turn.tokens_sent for turn in turns] == [40, 77 - 32]
    p, d = salts(tmp_path)
    whole = (*FIRST, *turns[0].tokens, *range(17))
    assert turns[1].tokens == reference(prompt("x", whole), [p] * len(whole), d)


def test_a_repeated_prompt_sends_no_cached_block(tmp_path: Path) -> None:
    async def run() -> list[Turn]:
        async with pair(tmp_path) as (p, d):
            turns = [await converse(p, d, prompt(f"r/{i}", token_ids)) for i, token_ids in enumerate(prompts)]
            await wait_empty(p, d)
            return turns

    prompts = (FIRST[:32], FIRST[:32], FIRST[:35])

    turns = asyncio.run(run())

    assert [turn.ticket.first_token for turn in turns] == [0, 32, 32]
    assert [turn.tokens_sent for turn in turns] == [32, 0, 3]
    assert turns[0].tokens == turns[1].tokens


def test_tenants_and_instances_without_the_cache_share_nothing(tmp_path: Path) -> None:
    async def run(tenants: tuple[str, ...], **options: object) -> list[Turn]:
        async with pair(tmp_path, **options) as (p, d):
            return [await converse(p, d, prompt(f"r/{i}", FIRST, tenant)) for i, tenant in enumerate(tenants)]

    unlike = asyncio.run(run(("a", "b")))
    off = asyncio.run(run(("a", "a"), enable_prefix_caching=False))
    small = asyncio.run(run(("a", "a"), block_size=8))

    for turns in (unlike, off, small):
        assert [turn.ticket.first_token for turn in turns] == [0, 0]
        assert [turn.tokens_sent for turn in turns] == [40, 40]
        assert [turn.times.cached_tokens for turn in turns] == [0, 0]
        assert turns[0].tokens == turns[1].tokens


def test_different_block_sizes_share_blocks_that_are_full_in_both(tmp_path: Path) -> None:
    async def run() -> list[Turn]:
        prefill = instance_config(tmp_path, Role.PREFILL, port=4, block_size=32)
        decode = instance_config(tmp_path, Role.DECODE, port=6, block_size=16)
        async with running(prefill) as (_, p), running(decode) as (_, d):
            return [await converse(p, d, prompt(f"r/{i}", tuple(range(3, 63)))) for i in range(2)]

    turns = asyncio.run(run())

    assert [turn.ticket.first_token for turn in turns] == [0, 48]
    assert [turn.times.cached_tokens for turn in turns] == [0, 32]
    assert [turn.tokens_sent for turn in turns] == [60, 12]


def test_a_cancelled_ticket_leaves_the_prefix_for_the_next(tmp_path: Path) -> None:
    async def run() -> tuple[int, Turn]:
        async with pair(tmp_path) as (p, d):
            await converse(p, d, prompt("r/0", FIRST))
            ticket = await reserve(d, prompt("r/1", FIRST))
            await d.session.send(Cancel("r/1"))
            assert isinstance(await d.next(Failed), Failed)
            turn = await converse(p, d, prompt("r/2", FIRST))
            await wait_empty(p, d)
            return ticket.first_token, turn

    first_token, turn = asyncio.run(run())

    assert (first_token, turn.ticket.first_token, turn.tokens_sent) == (32, 32, 8)


def test_a_combined_instance_reports_cached_and_written_tokens(tmp_path: Path) -> None:
    async def run() -> list[tuple[int, int]]:
        counts: list[tuple[int, int]] = []
        async with running(instance_config(tmp_path, Role.COMBINED, port=4)) as (_, client):
            for number in range(2):
                await client.session.send(Generate(prompt(f"r/{number}", FIRST)))
                steps: list[Step] = []
                while not steps or not steps[-1].tokens[-1].finish:
                    step = await client.next(Step, Failed)
                    assert isinstance(step, Step), step
                    steps.append(step)
                found = [times for step in steps for _, times in step.times]
                counts.append((sum(one.cached_tokens for one in found), sum(one.written_tokens for one in found)))
            await wait_empty(client)
            beat = await client.next(Heartbeat)
            assert isinstance(beat, Heartbeat)
            assert beat.load is not None
            assert (beat.load.blocks_used, beat.load.blocks_cached) == (0, 3)
            assert (beat.load.prefix_tokens_sought, beat.load.prefix_tokens_found) == (64, 32)
        return counts

    assert asyncio.run(run()) == [(0, 32), (32, 0)]


@pytest.mark.parametrize(("of_prefill", "of_decode"), [(2, 1), (1, 2), (2, 2)])
def test_every_rank_sends_and_receives_the_same_tokens_of_a_prompt(
    tmp_path: Path, of_prefill: int, of_decode: int
) -> None:
    async def run() -> list[Turn]:
        prefill = instance_config(tmp_path, Role.PREFILL, port=4, tensor_parallel_size=of_prefill)
        decode = instance_config(tmp_path, Role.DECODE, port=6, tensor_parallel_size=of_decode)
        async with running(prefill) as (_, p), running(decode) as (_, d):
            turns = [await converse(p, d, prompt(f"r/{i}", FIRST[:count])) for i, count in enumerate((32, 40, 32))]
            await wait_empty(p, d)
            return turns

    turns = asyncio.run(run())

    assert [turn.ticket.first_token for turn in turns] == [0, 32, 32]
    assert [turn.tokens_sent for turn in turns] == [32, 8, 0]
    assert turns[2].tokens == turns[0].tokens


@pytest.mark.parametrize(
    ("options", "num_notes"), [({}, 0), ({"enable_prefix_caching": False}, 0), ({"block_size": 8}, 1)]
)
def test_blocks_without_names_are_reported_once(tmp_path: Path, options: dict[str, object], num_notes: int) -> None:
    async def run() -> tuple[str, ...]:
        async with running(instance_config(tmp_path, Role.COMBINED, port=4, **options)) as (instance, _):
            return instance.notes

    notes = [note for note in asyncio.run(run()) if "prefix cache" in note]

    assert notes == ["the prefix cache is off: a block size of 8 tokens is not a multiple of 16"] * num_notes
