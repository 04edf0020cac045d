"""Instances with real models on devices of any kind, in this process: one alone, or P and D; and prompts for them."""

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path

from flags.options import EngineOptions
from instance.config import InstanceConfig
from tests.devices.fake_device import FakeDevice, FakeKind
from tests.engine.tiny_models import VOCAB_SIZE
from tests.instance.pair import Client, running
from tests.instance.test_handoff import wait_empty
from wire.messages import Failed, Generate, HandedOff, Prefill, Refused, Reserve, Reserved, Step
from wire.types import PromptState, Role, SamplingParams, StageTimes

NUM_TOKENS, CHUNK = 12, 48
START_S = 300.0  # a session or a ticket waits while its peer or link starts: in processes which import torch
_NUMBERS = random.Random(9)
PROMPTS = [[_NUMBERS.randrange(3, VOCAB_SIZE - 20) for _ in range(length)] for length in (5, 61, 150)]


@dataclass
class SeveralKind(FakeKind):
    """Each open returns another device, as in two instances' processes."""

    opened: list[FakeDevice] = field(default_factory=list)

    def open(self, index: int = 0) -> FakeDevice:
        self.opened.append(FakeDevice(len(self.opened), self.traits, self.total_bytes))
        return self.opened[-1]


def config(
    model: Path,
    role: Role,
    device: str,
    block_size: int | None,
    *transports: str,
    ranks: int = 1,
    port: int = 4,
    pool_bytes: int = 2 << 20,
) -> InstanceConfig:
    options = EngineOptions(
        model=str(model), device=device, dtype="float32", port=port, block_size=block_size, kv_transport=transports,
        kv_cache_memory=pool_bytes, prefill_chunk_size=CHUNK, max_num_seqs=len(PROMPTS),
    )  # fmt: skip
    return InstanceConfig(
        options, role, device_ids=tuple(str(port + rank) for rank in range(ranks)), ticket_lease_s=START_S
    )


async def cross(p: Client, d: Client, number: int) -> tuple[list[int | None], StageTimes]:
    """Run a prompt over the pair; return its tokens, P's first, and P's HandedOff event."""
    state = prompt(number)
    await d.session.send(Reserve(state))
    reserved = await d.next(Reserved, Refused)
    assert isinstance(reserved, Reserved), reserved
    await p.session.send(Prefill(state, reserved.ticket))
    first = await p.next(Step, Failed)
    assert isinstance(first, Step), first
    handed = await p.next(HandedOff, Failed)
    assert isinstance(handed, HandedOff), handed
    return [token.token_id for token in first.tokens] + await rest_of(d), handed.times


async def rest_of(client: Client) -> list[int | None]:
    """Return the remaining tokens of the one running sequence."""
    tokens: list[int | None] = []
    while True:
        step = await client.next(Step, Failed)
        assert isinstance(step, Step), step
        tokens += [token.token_id for token in step.tokens]
        if any(token.finish is not None for token in step.tokens):
            return tokens


def prompt(number: int) -> PromptState:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    return PromptState(f"r/{number}", "r", tuple(PROMPTS[number]), params)


def serve_pair(prefill: InstanceConfig, decode: InstanceConfig) -> tuple[list[list[int | None]], set[str]]:
    """Serve all prompts over the pair; return their tokens, and the transports that carried their KV."""

    async def run() -> list[tuple[list[int | None], StageTimes]]:
        async with running(prefill, lease_s=START_S) as (_, p), running(decode, lease_s=START_S) as (_, d):
            served = [await cross(p, d, number) for number in range(len(PROMPTS))]
            await wait_empty(p, d)
            return served

    served = asyncio.run(run())
    return [tokens for tokens, _ in served], {times.transport for _, times in served}


def serve_alone(combined: InstanceConfig) -> list[list[int | None]]:
    async def run() -> list[list[int | None]]:
        outputs = []
        async with running(combined) as (_, client):
            for number in range(len(PROMPTS)):
                await client.session.send(Generate(prompt(number)))
                outputs.append(await rest_of(client))
            await wait_empty(client)
        return outputs

    return asyncio.run(run())
