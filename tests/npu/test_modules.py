"""Modules of networks by NPU ops: which are replaced, that they equal the original, and that others stay."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Gemma2Config, GPTNeoXConfig, LlamaConfig, OPTConfig, Qwen3Config

from engine.modules.check import PartCheck
from engine.npu.modules import replace_modules
from tests.engine.small_networks import GQA, SIZES, logits, network
from tests.npu.ops import NpuOps

pytestmark = pytest.mark.usefixtures("npu_ops")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("config", "rotary"),
    [
        (lambda: LlamaConfig(**GQA), "npu_rotary_mul"),
        (lambda: LlamaConfig(**GQA, head_dim=64), "npu_apply_rotary_pos_emb"),
        (lambda: LlamaConfig(**GQA, mlp_bias=True, attention_bias=True), "npu_rotary_mul"),
        (lambda: Qwen3Config(**GQA, head_dim=128), "npu_apply_rotary_pos_emb"),
    ],
    ids=["llama", "llama-64", "llama-bias", "qwen3-128"],
)
def test_a_known_network_runs_by_npu_ops_with_equal_output(
    npu_ops: NpuOps, config: Callable[[], Any], rotary: str, dtype: torch.dtype
) -> None:
    made = network(config(), dtype)
    expected, names = logits(made), [name for name, _ in made.named_modules()]

    (line,) = replace_modules(made)
    npu_ops.calls.clear()
    got = logits(made)

    norms = 9 if hasattr(made.model.layers[0].self_attn, "q_norm") else 5
    assert line == f"by NPU ops: {norms} norms, 2 gated MLPs, 2 attentions, 2 layers"
    assert set(npu_ops.names()) == {"npu_rms_norm", "npu_add_rms_norm", "npu_swiglu", rotary}
    limit = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]
    assert float((got - expected).norm() / expected.norm()) < limit
    assert [name for name, _ in made.named_modules()] == names


@pytest.mark.parametrize(
    "config",
    [
        lambda: OPTConfig(**SIZES, ffn_dim=96, word_embed_proj_dim=64),
        lambda: GPTNeoXConfig(**SIZES, intermediate_size=96),
    ],
    ids=["opt", "gpt-neox"],
)
def test_an_unknown_network_stays_unchanged(npu_ops: NpuOps, config: Callable[[], Any]) -> None:
    made = network(config())
    expected = logits(made)

    assert replace_modules(made) == ("by NPU ops: nothing",)

    torch.testing.assert_close(logits(made), expected, rtol=0, atol=0)
    assert npu_ops.names() == []


def test_modules_that_only_resemble_known_ones_stay(caplog: pytest.LogCaptureFixture) -> None:
    made = network(Gemma2Config(**GQA, head_dim=16))  # norms with one added to their weights
    expected = logits(made)

    (line,) = replace_modules(made)

    assert line == "by NPU ops: 2 attentions; not replaced: 9 norms"
    assert [record.getMessage().split()[0] for record in caplog.records] == ["module_not_replaced"]
    torch.testing.assert_close(logits(made), expected, rtol=1e-5, atol=1e-5)


def test_a_module_with_hooks_stays() -> None:
    made = network(LlamaConfig(**GQA))
    made.model.layers[1].mlp.gate_proj.register_forward_hook(lambda *_: None)
    made.model.norm.register_forward_hook(lambda *_: None)

    (line,) = replace_modules(made)

    assert line == "by NPU ops: 4 norms, 1 gated MLPs, 2 attentions, 2 layers"


@pytest.mark.parametrize(
    ("part", "stays"),
    [
        ("norm", "5 norms"),
        ("gate", "2 gated MLPs"),
        ("turn", "2 attentions"),
        ("options", "2 attentions"),
    ],
)
def test_a_replacement_with_wrong_results_is_not_kept(part: str, stays: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = torch.ops.npu
    norm, gate, turn = ops.npu_rms_norm, ops.npu_swiglu, ops.npu_rotary_mul
    if part == "norm":
        monkeypatch.setattr(ops, "npu_rms_norm", lambda x, w, e: (norm(x, w, e)[0] * 1.001,))
    elif part == "gate":
        monkeypatch.setattr(ops, "npu_swiglu", lambda x: gate(x.roll(x.shape[-1] // 2, -1)))
    elif part == "turn":
        monkeypatch.setattr(ops, "npu_rotary_mul", lambda x, cos, sin: turn(x, cos, -sin))
    else:
        original = PartCheck.options_of

        def other(check: PartCheck, module: nn.Module) -> Any:
            found = original(check, module)
            return type(found)(found.scaling * 2) if found else None

        monkeypatch.setattr(PartCheck, "options_of", other)
    made = network(LlamaConfig(**GQA))
    expected = logits(made)

    (line,) = replace_modules(made)

    assert line.endswith(f"not replaced: {stays}")
    torch.testing.assert_close(logits(made), expected, rtol=1e-4, atol=1e-5)


def test_an_op_that_raises_leaves_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("aclnnSwiGlu is not there")

    monkeypatch.setattr(torch.ops.npu, "npu_swiglu", fail)

    (line,) = replace_modules(network(LlamaConfig(**GQA)))

    assert line == "by NPU ops: 5 norms, 2 attentions, 2 layers; not replaced: 2 gated MLPs"
