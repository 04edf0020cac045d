"""P and D on devices of different kinds, with real models: the tokens equal one instance's and transformers'."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from devices import cuda, npu, table
from devices.collectives import COLLECTIVES
from engine.oracle import generate_greedy
from instance.offered_transports import describe_transports
from tests.devices.fake_device import TRAITS
from tests.engine.tiny_models import make_tiny_model
from tests.instance.device_pair import NUM_TOKENS, PROMPTS, SeveralKind, config, cross, serve_alone, serve_pair
from tests.instance.pair import running
from tests.instance.test_handoff import wait_empty
from tests.kvtransfer.groups import group_threads
from tests.kvtransfer.hccl_on_cpu import hccl_on_cpu
from tests.kvtransfer.hccl_rules import HcclRules
from tests.kvtransfer.nccl_rules import NcclRules
from tests.kvtransfer.rig import until
from wire.errors import ConfigError
from wire.types import Role, StageTimes

START_S = 300.0  # ranks are processes which import torch


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("mixed") / "llama")


@pytest.fixture(scope="module")
def reference(model: Path) -> list[list[int]]:
    """The tokens that transformers generates after each prompt."""
    return generate_greedy(model, PROMPTS, NUM_TOKENS, dtype="float32", ignore_eos=True)


@pytest.fixture(autouse=True)
def kinds(monkeypatch: pytest.MonkeyPatch) -> dict[str, SeveralKind]:
    """The fake device, and stand-ins for an NPU and a GPU, which differ from them in tensors and attention only."""
    made = {"fake": SeveralKind(TRAITS)} | {
        traits.kind: SeveralKind(replace(traits, attention="reference")) for traits in (npu.TRAITS, cuda.TRAITS)
    }
    for name, kind in made.items():
        monkeypatch.setitem(table.KINDS, name, kind)
    return made


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HcclRules]:
    """Replace hccl by gloo under HCCL's rules, between staging memory of the devices."""
    with hccl_on_cpu(monkeypatch, tmp_path, on_host=False) as made:
        yield made


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[NcclRules]:
    """Replace nccl by gloo under NCCL's rules, between staging memory of the devices."""
    made = NcclRules()
    monkeypatch.setitem(COLLECTIVES, "nccl", made.collective())
    yield made
    assert made.broken == []
    until(lambda: not group_threads())


@pytest.mark.parametrize("device", ["cpu", "fake", "npu", "cuda"])
def test_a_combined_instance_on_each_device_equals_transformers(
    device: str, model: Path, reference: list[list[int]]
) -> None:
    assert serve_alone(config(model, Role.COMBINED, device, None)) == reference


@pytest.mark.parametrize(
    ("p_device", "d_device", "p_block", "d_block", "transport"),
    [
        ("cpu", "fake", 16, 32, "tcp"), ("npu", "cpu", None, None, "tcp"), ("fake", "cpu", 16, 32, "process_group"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("fake", "cpu", 32, 128, "tcp"), ("cpu", "npu", None, None, "tcp"), ("npu", "fake", 128, 16, "tcp"),
                ("fake", "npu", 16, 32, "tcp"), ("cpu", "fake", 128, 16, "process_group"),
                ("fake", "fake", 32, 128, "process_group"),
            )
        ),
    ],
)  # fmt: skip
def test_a_prompt_is_handed_off_between_kinds_and_block_sizes(
    p_device: str, d_device: str, p_block: int | None, d_block: int | None, transport: str, model: Path,
    reference: list[list[int]], kinds: dict[str, SeveralKind],
) -> None:  # fmt: skip
    prefill = config(model, Role.PREFILL, p_device, p_block, transport, port=4)
    decode = config(model, Role.DECODE, d_device, d_block, transport, port=6)

    outputs, transports = serve_pair(prefill, decode)

    assert outputs == reference
    assert transports == {transport}
    assert all(device.recorded > 0 for name in {p_device} - {"cpu"} for device in kinds[name].opened[:1])


def assert_groups_carry_prompts(
    kind: SeveralKind, blocks: tuple[int, int], model: Path, reference: list[list[int]]
) -> None:
    """Assert that a pair on two devices of the kind gives the reference's tokens over process groups."""
    name = kind.traits.kind
    prefill, decode = (
        config(model, role, name, block, "process_group", port=port)
        for role, block, port in zip((Role.PREFILL, Role.DECODE), blocks, (4, 6), strict=True)
    )

    assert serve_pair(prefill, decode) == (reference, {"process_group"})
    assert [device.name for device in kind.opened] == [f"{name}:0", f"{name}:1"]


@pytest.mark.long  # tests/npu/test_hand_off.py is always run
@pytest.mark.covers("A10.136")
@pytest.mark.parametrize("blocks", [(16, 128), (128, 128), (128, 32)])
def test_a_hand_off_between_npus_uses_hccl_groups_by_their_rules(
    blocks: tuple[int, int], model: Path, reference: list[list[int]], rules: HcclRules, kinds: dict[str, SeveralKind]
) -> None:
    assert_groups_carry_prompts(kinds["npu"], blocks, model, reference)

    assert rules.made == 2


@pytest.mark.covers("A10.137")
@pytest.mark.parametrize(
    "blocks", [(16, 128), *(pytest.param(case, marks=pytest.mark.long) for case in ((16, 16), (128, 32)))]
)
def test_a_hand_off_between_gpus_uses_nccl_groups_by_their_rules(
    blocks: tuple[int, int], model: Path, reference: list[list[int]], nccl: NcclRules, kinds: dict[str, SeveralKind]
) -> None:
    assert_groups_carry_prompts(kinds["cuda"], blocks, model, reference)

    assert nccl.made == 2


def test_kinds_without_a_common_collective_fall_back_to_tcp(
    model: Path, reference: list[list[int]], rules: HcclRules
) -> None:
    prefill = config(model, Role.PREFILL, "cpu", None, "process_group", "tcp", port=4)
    decode = config(model, Role.DECODE, "npu", None, "process_group", "tcp", port=6)

    outputs, transports = serve_pair(prefill, decode)

    assert outputs == reference
    assert transports == {"tcp"}
    assert rules.made == 0


def test_a_mixed_pair_uses_tcp_and_reports_why_not_shm(model: Path, reference: list[list[int]]) -> None:
    outputs, transports = serve_pair(
        config(model, Role.PREFILL, "cpu", None, port=4), config(model, Role.DECODE, "fake", None, port=6)
    )

    assert outputs == reference
    assert transports == {"tcp"}


def test_shm_is_refused_with_a_reason_for_a_pool_on_a_device(model: Path) -> None:
    named = config(model, Role.DECODE, "fake", None, "shm", "tcp")

    async def start() -> None:
        async with running(named):
            pass

    with pytest.raises(
        ConfigError, match=r"--kv-transport shm: the KV pool is on fake:0: peers can map host memory only"
    ):
        asyncio.run(start())


@pytest.mark.parametrize(("role", "num_warnings"), [(Role.PREFILL, 1), (Role.COMBINED, 0)])
def test_an_instance_on_a_device_reports_its_transports(
    role: Role, num_warnings: int, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> tuple[str, ...]:
        async with running(config(model, role, "fake", None)) as (instance, _):
            return describe_transports((), instance._host.engine.memories[0])

    words = asyncio.run(run())

    assert "tcp" in words
    assert any(one.startswith("shm: the KV pool is on fake:0") for one in words)
    warnings = [line for line in caplog.messages if line.startswith("kv_through_host ")]
    assert len(warnings) == num_warnings
    assert all("device=fake:0" in line and "shm: the KV pool is on fake:0" in line for line in warnings)


@pytest.mark.long
def test_a_prompt_is_handed_from_cpu_ranks_to_a_device_and_back(model: Path, reference: list[list[int]]) -> None:
    two_ranks = config(model, Role.COMBINED, "cpu", 16, "tcp", ranks=2, port=4)
    device = config(model, Role.COMBINED, "fake", 128, "tcp", port=6)

    async def run() -> list[tuple[list[int | None], StageTimes]]:
        async with asyncio.timeout(START_S), running(two_ranks) as (_, ranks), running(device) as (_, fake):
            served = [await cross(ranks, fake, number) for number in (1, 2)]
            served += [await cross(fake, ranks, 0)]
            await wait_empty(ranks, fake)
            return served

    served = asyncio.run(run())

    assert [tokens for tokens, _ in served] == [reference[1], reference[2], reference[0]]
    assert all(times.kv_bytes > 0 for _, times in served)
