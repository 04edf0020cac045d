"""Instances answer prompts with pooling: a decoder beside text generation, an encoder instead of it."""

import asyncio
from pathlib import Path

import pytest

from flags.options import EngineOptions
from instance.config import InstanceConfig
from tests.engine.tiny_encoders import make_bert, make_cross_encoder
from tests.instance.pair import instance_config, running
from wire.messages import Cancel, Generate, Pooled, Refused, Reserve, Step
from wire.types import Pooling, PromptState, Role, SamplingParams

TEXT = tuple(range(3, 20))


def pooling_prompt(name: str, pooling: Pooling | None) -> PromptState:
    return PromptState(name, f"r-{name}", TEXT, SamplingParams(max_tokens=3, temperature=0.0), pooling=pooling)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.COMBINED])
def test_a_decoder_answers_vectors_and_text_side_by_side(role: Role, tmp_path: Path) -> None:
    async def run() -> Pooled:
        async with running(instance_config(tmp_path, role, port=4)) as (instance, client):
            await client.session.send(Generate(pooling_prompt("text", None)))
            await client.session.send(Generate(pooling_prompt("vector", Pooling())))
            pooled = await client.next(Pooled)
            assert isinstance(pooled, Pooled)
            assert instance._host.engine.load().held_prompts == 0
            return pooled

    pooled = asyncio.run(run())

    assert pooled.prompt_id == "vector"
    assert len(pooled.values) == 2
    assert pooled.times.prefill_s is not None


@pytest.mark.parametrize(("kind", "size"), [("embed", 24), ("classify", 1)])
def test_an_encoder_answers_its_kind_and_refuses_other_requests(kind: str, size: int, tmp_path: Path) -> None:
    folder = make_bert(tmp_path) if kind == "embed" else make_cross_encoder(tmp_path)
    options = EngineOptions(model=str(folder), port=4, dtype="float32", max_num_seqs=4)

    async def run() -> tuple[Pooled, Refused, Refused]:
        async with running(InstanceConfig(options, Role.COMBINED, device_ids=("4",))) as (_, client):
            await client.session.send(Generate(pooling_prompt("right", Pooling(kind))))
            pooled = await client.next(Pooled)
            await client.session.send(Generate(pooling_prompt("text", None)))
            text = await client.next(Refused)
            await client.session.send(
                Generate(pooling_prompt("other", Pooling("classify" if kind == "embed" else "embed")))
            )
            other = await client.next(Refused)
            assert isinstance(pooled, Pooled)
            assert isinstance(text, Refused)
            assert isinstance(other, Refused)
            return pooled, text, other

    pooled, text, other = asyncio.run(run())

    assert len(pooled.values) == size
    assert (text.prompt_id, text.error) == ("text", "InvalidRequest")
    assert "generates no text" in text.message
    assert f"supports only {kind}" in other.message


def test_a_cancelled_vector_leaves_no_state(tmp_path: Path) -> None:
    async def run() -> None:
        config = instance_config(tmp_path, Role.PREFILL, port=4, prefill_chunk_size=4)
        async with running(config) as (instance, client):
            await client.session.send(Generate(pooling_prompt("gone", Pooling())))
            await client.session.send(Cancel("gone"))
            await client.session.send(Generate(pooling_prompt("next", Pooling())))
            while True:
                event = await client.next(Pooled, Step)
                if isinstance(event, Pooled) and event.prompt_id == "next":
                    break
            decode = instance._host.workers.decode
            assert decode.owner_of("gone") is None
            assert decode.owner_of("next") is None

    asyncio.run(run())


def test_a_reservation_for_a_vector_is_released(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(instance_config(tmp_path, Role.DECODE, port=6)) as (instance, client):
            await client.session.send(Reserve(pooling_prompt("a", Pooling())))
            refused = await client.next(Refused)
            assert isinstance(refused, Refused)
            assert "has no KV hand-off" in refused.message
            assert instance._host.engine.blocks.num_used == 0

    asyncio.run(run())
