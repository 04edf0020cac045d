"""Instances of several fake ranks: hand-offs work between any numbers of ranks, and the tokens prove each head."""

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from instance.config import InstanceConfig
from testing.engine.fake_model import FakeConfig, expected_tokens
from testing.instance.fake_engine import fake_model
from tests.instance.pair import instance_config, running
from tests.instance.test_handoff import hand_off, wait_empty
from wire.errors import ConfigError
from wire.kv_layout import head_range
from wire.types import PromptState, Role, SamplingParams

PROMPT = tuple(range(3, 53))
KV = [[0, "k", 3, 64], [0, "v", 3, 64], [1, "latent", 1, 576], [3, "k", 2, 6]]
FAKE = {"vocab_size": 500, "max_model_len": 256, "num_layers": 5, "dtype": "bfloat16", "kv_tensors": KV}


def config(folder: Path, role: Role, devices: Sequence[int], block_size: int = 16, **options: object) -> InstanceConfig:
    """A fake of mixed layers, with a rank for each device."""
    options |= {"dtype": "bfloat16", "block_size": block_size, "kv_cache_memory": 4 << 20}
    made = instance_config(folder, role, port=devices[0], **options)
    (folder / "fake.json").write_text(json.dumps(FAKE))
    return dataclasses.replace(made, device_ids=tuple(map(str, devices)))


def expected(prefill: InstanceConfig, decode: InstanceConfig, params: SamplingParams) -> tuple[int, ...]:
    salts = []
    for one in (prefill, decode):
        model = fake_model(one)
        salts.append(model._config.salt)  # type: ignore[attr-defined]
        model.close()
    fake = FakeConfig(**{**FAKE, "kv_tensors": tuple(map(tuple, KV))})  # type: ignore[arg-type]
    return expected_tokens(
        fake, PROMPT, params, count=params.max_tokens, salts=[salts[0]] * len(PROMPT) + [salts[1]]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("p_devices", "d_devices", "blocks", "transport"),
    [
        ((0, 1), (4, 5, 6, 7), (16, 128), "shm"), ((0, 1, 2, 3), (4, 5), (128, 16), "tcp"),
        ((0,), (4, 5), (16, 16), "tcp"), ((0, 1, 2, 3), (4,), (16, 128), "shm"),
        ((0, 1), (4, 5), (16, 16), "process_group"), ((0, 1), (4, 5, 6, 7), (16, 128), "process_group"),
    ],
)  # fmt: skip
def test_the_tokens_prove_every_head_of_a_hand_off(
    tmp_path: Path, p_devices: tuple[int, ...], d_devices: tuple[int, ...], blocks: tuple[int, int], transport: str
) -> None:
    prefill = config(tmp_path, Role.PREFILL, p_devices, blocks[0], kv_transport=(transport,))
    decode = config(tmp_path, Role.DECODE, d_devices, blocks[1], kv_transport=(transport,))

    async def run() -> list[int | None]:
        async with running(prefill) as (_, p), running(decode) as (_, d):
            tokens = await hand_off(p, d, state)
            await wait_empty(p, d)
            return [token.token_id for token in tokens]

    state = PromptState("r/0", "r", PROMPT, SamplingParams(max_tokens=12, temperature=0.0))

    assert tuple(asyncio.run(run())) == expected(prefill, decode, state.params)


def test_prompts_are_handed_off_between_two_and_four_ranks_both_ways(tmp_path: Path) -> None:
    one, other = config(tmp_path, Role.COMBINED, (0, 1)), config(tmp_path, Role.COMBINED, (4, 5, 6, 7), 128)

    async def run() -> list[tuple[int | None, ...]]:
        async with running(one) as (_, two_ranks), running(other) as (_, four_ranks):
            there = await hand_off(two_ranks, four_ranks, PromptState("r/0", "r", PROMPT, params))
            back = await hand_off(four_ranks, two_ranks, PromptState("r/1", "r", PROMPT, params, cache_salt="other"))
            await wait_empty(two_ranks, four_ranks)
            return [tuple(token.token_id for token in tokens) for tokens in (there, back)]

    params = SamplingParams(max_tokens=9, temperature=0.0)

    assert asyncio.run(run()) == [expected(one, other, params), expected(other, one, params)]


def test_an_instance_describes_its_ranks_ports_and_whole_pool(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(config(tmp_path, Role.DECODE, (4, 5))) as (instance, _):
            found = instance._host.describe()
            assert [endpoint.rank for endpoint in found.endpoints] == [0, 0, 1, 1]
            assert len({endpoint.address for endpoint in found.endpoints}) == 4
            assert [(tensor.layer, tensor.name, tensor.heads, tensor.head_dim) for tensor in found.kv_tensors] == [
                tuple(tensor) for tensor in KV
            ]

    asyncio.run(run())


def test_the_flag_makes_as_many_ranks_as_a_list_of_devices(tmp_path: Path) -> None:
    by_devices = fake_model(config(tmp_path, Role.PREFILL, (0, 1)))
    by_flag = fake_model(config(tmp_path, Role.PREFILL, (0,), tensor_parallel_size=2))

    for model in (by_devices, by_flag):
        layouts = [memory.layout for memory in model.memories]
        assert [layout.rank.number for layout in layouts] == [0, 1]
        assert all(layout.heads[0] == head_range(3, layout.rank) for layout in layouts)
        assert len({layout.num_blocks for layout in layouts}) == 1
        assert sum(layout.total_bytes for layout in layouts) <= (4 << 20) + 2 * 4 * 4096
        model.close()


@pytest.mark.parametrize("kv", [[[0, "k", 2]], [[0, "k", "two", 4]]])
def test_invalid_tensors_are_refused(tmp_path: Path, kv: list[object]) -> None:
    invalid = config(tmp_path, Role.PREFILL, (0,))
    (tmp_path / "fake.json").write_text(json.dumps({**FAKE, "kv_tensors": kv}))

    with pytest.raises(ConfigError, match="no fake model can be built with ranks 1"):
        fake_model(invalid)
