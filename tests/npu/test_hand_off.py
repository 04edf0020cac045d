"""Hand-offs from and to the NPU path with real models: over hccl (gloo under hccl's rules) and over tcp."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from devices import npu, table
from devices.collectives import HCCL_DEFAULTS
from engine.oracle import generate_greedy
from instance import ranks
from tests.engine.tiny_models import make_tiny_model
from tests.instance.device_pair import NUM_TOKENS, PROMPTS, START_S, config, cross, serve_pair
from tests.instance.pair import running
from tests.instance.test_handoff import wait_empty
from tests.kvtransfer.hccl_on_cpu import hccl_on_cpu
from tests.kvtransfer.hccl_rules import HcclRules
from tests.npu.npu_on_cpu import NpuKind
from tests.npu.ops import NpuOps
from wire.types import Role


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HcclRules]:
    monkeypatch.setitem(table.KINDS, "npu", NpuKind(npu.TRAITS))
    with hccl_on_cpu(monkeypatch, tmp_path, on_host=False) as made:
        yield made


@pytest.mark.usefixtures("attention_in_float32")
@pytest.mark.parametrize(
    ("p_device", "d_device", "transport"),
    [
        ("npu", "cpu", "tcp"),
        pytest.param("npu", "npu", "process_group", marks=pytest.mark.long),
        pytest.param("cpu", "npu", "tcp", marks=pytest.mark.long),
    ],
)
def test_a_prompt_is_handed_off_from_and_to_the_npu_path(
    p_device: str, d_device: str, transport: str, npu_ops: NpuOps, rules: HcclRules, tmp_path: Path
) -> None:
    model = make_tiny_model("qwen3", tmp_path / "qwen3")
    prefill = config(model, Role.PREFILL, p_device, None, transport, port=4, pool_bytes=8 << 20)
    decode = config(model, Role.DECODE, d_device, None, transport, port=6, pool_bytes=8 << 20)

    outputs, transports = serve_pair(prefill, decode)

    assert outputs == generate_greedy(model, PROMPTS, NUM_TOKENS, dtype="float32", ignore_eos=True)
    assert transports == {transport}
    assert rules.made == (2 if transport == "process_group" else 0)
    assert "npu_fused_infer_attention_score" in npu_ops.names()


@pytest.mark.long
@pytest.mark.usefixtures("attention_in_float32", "npu_ops")
@pytest.mark.parametrize(("p_ranks", "d_ranks"), [(2, 2), (2, 1)])
def test_the_guides_pair_with_two_ranks_runs_over_hccl(
    p_ranks: int, d_ranks: int, rules: HcclRules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks all-reduce in their own processes, links are in others. Without --kv-transport TCP carries KV at first."""
    monkeypatch.setattr(ranks, "DEVICE_PROGRAM", "tests.npu.npu_rank")
    for name, value in HCCL_DEFAULTS.items():
        monkeypatch.setenv(name, value)
    model = make_tiny_model("qwen3", tmp_path / "qwen3")
    prefill = config(model, Role.PREFILL, "npu", None, ranks=p_ranks, port=4, pool_bytes=8 << 20)
    decode = config(model, Role.DECODE, "npu", None, ranks=d_ranks, port=6, pool_bytes=8 << 20)

    async def run() -> None:
        async with (
            asyncio.timeout(START_S), running(prefill, lease_s=START_S) as (_, p),
            running(decode, lease_s=START_S) as (_, d),
        ):  # fmt: skip
            transports = {"tcp"}
            while transports != {"process_group"}:
                served = [await cross(p, d, number) for number in range(len(PROMPTS))]
                assert [tokens for tokens, _ in served] == reference
                assert all(times.kv_bytes > 0 for _, times in served)
                transports = {times.transport for _, times in served}
            await wait_empty(p, d)

    reference = generate_greedy(model, PROMPTS, NUM_TOKENS, dtype="float32", ignore_eos=True)
    asyncio.run(run())

    num_sums = sum(number for number in (p_ranks, d_ranks) if number > 1)
    assert rules.made == num_sums + 2 * max(p_ranks, d_ranks)
