"""Hand-offs from and to the NPU path with real models: over hccl (gloo under hccl's rules) and over tcp."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from devices import npu, table
from engine.oracle import generate_greedy
from tests.devices.fake_device import FakeKind
from tests.engine.tiny_models import make_tiny_model
from tests.instance.device_pair import NUM_TOKENS, PROMPTS, config, serve_pair
from tests.kvtransfer.hccl_on_cpu import hccl_on_cpu
from tests.kvtransfer.hccl_rules import HcclRules
from tests.npu.npu_on_cpu import NpuOnCpu
from tests.npu.ops import NpuOps
from wire.types import Role


@dataclass
class NpuKind(FakeKind):
    """Each device that is opened is another NPU."""

    opened: list[NpuOnCpu] = field(default_factory=list)

    def open(self, index: int = 0) -> NpuOnCpu:
        self.opened.append(NpuOnCpu(len(self.opened)))
        return self.opened[-1]


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HcclRules]:
    monkeypatch.setitem(table.KINDS, "npu", NpuKind(npu.TRAITS))
    with hccl_on_cpu(monkeypatch, tmp_path, on_host=False) as made:
        yield made


@pytest.mark.usefixtures("attention_in_float32")
@pytest.mark.parametrize(
    ("p_device", "d_device", "transport"),
    [("npu", "npu", "process_group"), ("npu", "cpu", "tcp"), ("cpu", "npu", "tcp")],
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
