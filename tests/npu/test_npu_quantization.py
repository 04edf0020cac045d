"""Quantised layers on an NPU: its formats by the wheel's schemas and meta kernels, and whole models served by them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from devices.npu import TRAITS
from engine.loader import LoadedModel, load_model
from engine.oracle import Oracle
from engine.quantization.interface import EvenGroups, Grouped
from engine.quantization.kept import KeptFormat, KeptLinear, KeptWeight, kept_weight
from engine.quantization.kept_check import disagreement
from engine.quantization.kept_npu import STATIC_W8A8, W8A8, AntiquantFormat
from engine.quantization.kept_rounded import RoundedFormat
from engine.quantization.kept_static import StaticFormat
from engine.quantization.kept_table import formats_named
from tests.devices.card_device import CardDevice
from tests.engine.plain_static import static_layer
from tests.engine.rank_logits import rank_logits
from tests.engine.step_runner import generate
from tests.engine.tiny_families import make_family
from tests.engine.tiny_models import make_tiny_model
from tests.engine.tiny_quantised import Scheme, awq, gptq, modelslim, packed, quantise_checkpoint, w8a8
from tests.npu.npu_on_cpu import NpuOnCpu
from tests.npu.ops import NpuOps
from tests.npu.rules import Refused

_PROMPTS = [[5, 9, 200, 31, 7], [17] * 3 + [4, 250, 96, 12, 300, 44], list(range(40, 75))]
_DTYPES = (torch.bfloat16, torch.float16)
_ANTIQUANT = "npu_weight_quant_batchmatmul"
_W8A8 = ("npu_dynamic_quant", "npu_quant_matmul")
_STATIC = ("npu_quantize", "npu_quant_matmul")

pytestmark = pytest.mark.usefixtures("npu_ops")


def layer(outputs: int, inputs: int, size: int, *, codes: torch.dtype = torch.uint8, largest: int = 15) -> Grouped:
    numbers = torch.Generator().manual_seed(outputs + inputs)
    shape = (outputs, inputs // size)
    least = 0 if codes == torch.uint8 else -largest
    made = torch.randint(least, largest + 1, (outputs, inputs), generator=numbers, dtype=torch.int16).to(codes)
    zeros = torch.randint(0, largest + 1, shape, generator=numbers, dtype=torch.int16).to(codes)
    return Grouped(made, torch.rand(shape, generator=numbers).half() * 0.05 + 0.01, zeros, EvenGroups(size))


def int8_layer(outputs: int, inputs: int) -> Grouped:
    return replace(layer(outputs, inputs, inputs, codes=torch.int8, largest=127), zeros=None)


def whole(grouped: Grouped, *, rounded_inputs: torch.dtype | None = None) -> KeptWeight:
    weight = kept_weight(grouped, rounded_inputs=rounded_inputs)
    assert isinstance(weight, KeptWeight), weight
    return weight


def compared(
    grouped: Grouped, form: KeptFormat, dtype: torch.dtype, *, rounded_inputs: torch.dtype | None = None
) -> str | None:
    weight = whole(grouped, rounded_inputs=rounded_inputs)
    assert form.handles(weight)
    assert form.lacking(weight, dtype) is None
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    return disagreement(KeptLinear(linear, form.pack(weight, dtype), weight.order), grouped, weight, form, dtype)


def test_an_npu_prefers_w8a8_and_else_keeps_only_weights() -> None:
    assert formats_named(TRAITS.kept_linears) == (RoundedFormat(W8A8), StaticFormat(STATIC_W8A8), AntiquantFormat())


@pytest.mark.combinations(1)
@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize(
    "grouped",
    [
        layer(48, 128, 32),
        layer(16, 256, 64),
        layer(24, 96, 96),
        layer(16, 128, 64, largest=255),
        layer(16, 128, 128, codes=torch.int8, largest=127),
        int8_layer(24, 64),
    ],
    ids=["4 bits", "groups of 64", "one group", "8 bits", "int8 with zeros", "int8"],
)
def test_weight_only_products_equal_dequantised_ones(grouped: Grouped, dtype: torch.dtype, npu_ops: NpuOps) -> None:
    assert compared(grouped, AntiquantFormat(), dtype) is None

    assert _ANTIQUANT in npu_ops.names()


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("largest", [15, 255])
def test_weights_are_exact_where_the_dtype_holds_their_scales(largest: int, dtype: torch.dtype) -> None:
    grouped = layer(16, 64, 32, largest=largest)
    grouped = replace(grouped, scales=torch.exp2(grouped.scales.float().log2().round()))
    assert grouped.zeros is not None

    got = AntiquantFormat().pack(whole(grouped), dtype)(torch.eye(64, dtype=dtype))

    groups = torch.arange(64) // 32
    matrix = (grouped.codes.double() - grouped.zeros.double()[:, groups]) * grouped.scales.double()[:, groups]
    assert torch.equal(got.double(), matrix.t())


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_w8a8_products_use_the_weights_and_rounded_inputs(dtype: torch.dtype, npu_ops: NpuOps) -> None:
    grouped = int8_layer(24, 96)
    rows = torch.randn(5, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    matrix = grouped.codes.double().numpy() * grouped.scales.double().numpy()
    steps = rows.double().abs().amax(1, keepdim=True).numpy() / 127

    got = RoundedFormat(W8A8).pack(whole(grouped, rounded_inputs=torch.int8), dtype)(rows)

    expected = np.round(rows.double().numpy() / steps) @ matrix.T * steps
    assert got.dtype == dtype
    assert got.double().numpy() == pytest.approx(expected, rel=float(torch.finfo(dtype).eps))
    assert npu_ops.names() == list(_W8A8)
    assert compared(grouped, RoundedFormat(W8A8), dtype, rounded_inputs=torch.int8) is None


@pytest.mark.parametrize(
    ("grouped", "form", "dtype", "message"),
    [
        (layer(16, 64, 32), AntiquantFormat(), torch.float32, "supports float16 and bfloat16, not float32"),
        (layer(16, 96, 24), AntiquantFormat(), torch.bfloat16, "groups in multiples of 32 inputs, not 24"),
        (layer(20, 64, 32), AntiquantFormat(), torch.bfloat16, "outputs in multiples of 8, not 20"),
        (int8_layer(16, 64), RoundedFormat(W8A8), torch.float32, "npu_quant_matmul supports float16 and bfloat16"),
        (layer(16, 64, 64, codes=torch.int8, largest=127), RoundedFormat(W8A8), torch.float16, "no zeros"),
        (static_layer(16, 64)[0], StaticFormat(STATIC_W8A8), torch.float32, "supports float16 and bfloat16"),
    ],
)
def test_unsupported_layers_are_reported(grouped: Grouped, form: KeptFormat, dtype: torch.dtype, message: str) -> None:
    assert message in str(form.lacking(whole(grouped, rounded_inputs=torch.int8), dtype))


def test_a_matrix_larger_than_16_bits_is_reported() -> None:
    tall = Grouped(torch.zeros(65_536, 8, dtype=torch.int8), torch.ones(65_536, 1), None, EvenGroups(8))

    for form in (RoundedFormat(W8A8), AntiquantFormat()):
        assert "supports at most 65535 x 65535, not 65536 x 8" in str(form.lacking(whole(tall), torch.bfloat16))


_WRONG: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "rows of float32": ("x is torch.float32", lambda c: c(x=c.x.float())),
    "scales of another dtype": ("antiquant_scale is torch.float32", lambda c: c(scale=c.scale.float())),
    "no group size": ("without groups", lambda c: c(group=0)),
    "a group of 48": ("a multiple of 32", lambda c: c(group=48)),
    "scales by output first": ("antiquant_scale is", lambda c: c(scale=c.scale.t(), offset=c.offset.t())),
    "offsets of one group": ("antiquant_offset is", lambda c: c(offset=c.offset[:1])),
    "a tensor for a number": ("Expected a value of type", lambda c: c(group=torch.tensor([32]))),
}


class _AntiquantCall:
    """A valid call, and the same call with other arguments."""

    def __init__(self) -> None:
        weight = whole(layer(16, 96, 32))
        self.x = torch.randn(3, 96).bfloat16()
        kernel: Any = AntiquantFormat().pack(weight, torch.bfloat16)
        self.packed, self.scale, self.offset = kernel.packed, kernel.scales, kernel.offsets

    def __call__(self, **changed: Any) -> torch.Tensor:
        given = {"x": self.x, "scale": self.scale, "offset": self.offset, "group": 32, **changed}
        made: torch.Tensor = torch.ops.npu.npu_weight_quant_batchmatmul(
            given["x"], self.packed, given["scale"], antiquant_offset=given["offset"],
            antiquant_group_size=given["group"],
        )  # fmt: skip
        return made


@pytest.mark.parametrize(("message", "wrong"), _WRONG.values(), ids=_WRONG)
def test_a_call_forbidden_by_the_documents_is_refused(message: str, wrong: Callable[[Any], Any]) -> None:
    call = _AntiquantCall()
    assert call().shape == (3, 16)

    with pytest.raises((Refused, RuntimeError), match=message):
        wrong(call)


@pytest.mark.parametrize(
    ("message", "changed"),
    [
        ("scale's dtype is bfloat16", {"scale": torch.ones(8, dtype=torch.bfloat16), "output_dtype": torch.float16}),
        (r"pertoken_scale is \[1\]", {"pertoken_scale": torch.ones(1)}),
        ("pertoken_scale is torch.float16", {"pertoken_scale": torch.ones(3).half()}),
        ("output_dtype None", {"output_dtype": None}),
        ("k dim of x1 and x2", {"x2": torch.ones(8, 32, dtype=torch.int8)}),
        ("scale is|scale", {"scale": torch.ones(8, 1)}),
        ("scale is torch.float32", {"pertoken_scale": None, "output_dtype": torch.float16}),
        ("int64", {"pertoken_scale": None, "scale": torch.ones(8, dtype=torch.int64)}),
        (r"bias is \[7\]|bias", {"pertoken_scale": None, "bias": torch.ones(7, dtype=torch.int32)}),
    ],
)
def test_an_int8_product_forbidden_by_the_documents_is_refused(message: str, changed: dict[str, Any]) -> None:
    right = {
        "x1": torch.ones(3, 32, dtype=torch.int8), "x2": torch.ones(32, 8, dtype=torch.int8), "scale": torch.ones(8),
        "pertoken_scale": torch.ones(3), "output_dtype": torch.bfloat16,
    }  # fmt: skip
    assert _quant_matmul(**right).shape == (3, 8)

    with pytest.raises((Refused, RuntimeError), match=message):
        _quant_matmul(**right | changed)


def _quant_matmul(x1: Any, x2: Any, scale: Any, **named: Any) -> torch.Tensor:
    made: torch.Tensor = torch.ops.npu.npu_quant_matmul(x1, x2, scale, **named)
    return made


def test_packing_refuses_other_than_contiguous_int4() -> None:
    pack = torch.ops.npu.npu_convert_weight_to_int4pack

    for message, weight in (
        ("leaves", torch.full((2, 8), 8, dtype=torch.int32)),
        ("weight is torch.int8", torch.zeros(2, 8, dtype=torch.int8)),
        ("not contiguous", torch.zeros(8, 8, dtype=torch.int32).t()),
        (r"\[k, 8 n\]", torch.zeros(8, 12, dtype=torch.int32)),
    ):
        with pytest.raises(Refused, match=message):
            pack(weight)


def _load(path: Path, dtype: str, formats: tuple[str, ...] = TRAITS.kept_linears) -> LoadedModel:
    device = NpuOnCpu()
    device.traits = replace(device.traits, kept_linears=formats)
    return load_model(path, dtype=dtype, block_size=128, kv_cache_memory=2 << 20, num_threads=1, device=device)


def _note(loaded: LoadedModel) -> str:
    (note,) = (note for note in loaded.notes if "kept" in note or "dequantised" in note)
    return note


@pytest.mark.usefixtures("kept_in_float32")
@pytest.mark.often("awq-32", "gptq-4-32-ordered", "w8a8-group")
@pytest.mark.parametrize(
    "scheme", [awq(32), gptq(4, 32, act_order=True), gptq(8, 32), packed(4, -1), w8a8("group")], ids=lambda s: s.name
)
def test_tokens_equal_transformers(scheme: Scheme, tmp_path: Path, npu_ops: NpuOps) -> None:
    """w8a8-group needs rounded inputs, which no op has with groups of 16: its weights are dequantised."""
    path = make_tiny_model("llama", tmp_path / "llama")
    quantise_checkpoint(scheme, path)

    loaded = _load(path, "float32")
    npu_ops.calls.clear()
    got = generate(loaded.model, _PROMPTS, 12, chunk=16)

    is_kept = scheme.name != "w8a8-group"
    assert (", kept: 14 of 14 quantised layers; " in _note(loaded)) == is_kept
    assert (_ANTIQUANT in npu_ops.names()) == is_kept
    assert got == Oracle(path, "float32").generate_greedy(_PROMPTS, 12, ignore_eos=True)


@pytest.mark.often("w8a8-channel")
@pytest.mark.usefixtures("kept_in_float32")
@pytest.mark.parametrize("scheme", [gptq(4, 32, act_order=True), w8a8("channel")], ids=lambda s: s.name)
def test_host_and_card_tensors_are_never_mixed(scheme: Scheme, tmp_path: Path) -> None:
    path = make_tiny_model("llama", tmp_path / "llama")
    quantise_checkpoint(scheme, path)
    device = CardDevice(attention="npu", block_size=128, kept_linears=TRAITS.kept_linears)

    loaded = load_model(
        path, dtype="float32", block_size=128, kv_cache_memory=2 << 20, num_threads=1, device=device
    )  # fmt: skip

    assert ", kept: 14 of 14 quantised layers; " in _note(loaded)
    got = generate(loaded.model, _PROMPTS[:1], 3, chunk=16)
    assert got == generate(_load(path, "float32").model, _PROMPTS[:1], 3, chunk=16)


@pytest.mark.usefixtures("kept_in_float32")
def test_w8a8_equals_transformers_with_inputs_rounded_by_token(tmp_path: Path, npu_ops: NpuOps) -> None:
    path = make_tiny_model("llama", tmp_path / "llama")
    quantise_checkpoint(w8a8("channel"), path)
    oracle = Oracle(path, "float32")
    for name, linear in oracle._network.named_modules():
        if isinstance(linear, nn.Linear) and name != "lm_head":
            linear.register_forward_pre_hook(_round_inputs)

    loaded = _load(path, "float32")
    npu_ops.calls.clear()
    got = generate(loaded.model, _PROMPTS, 12, chunk=16)

    assert ", kept: 14 of 14 quantised layers; " in _note(loaded)
    assert _note(loaded).endswith("; inputs are rounded to int8, token by token")
    assert set(_W8A8) <= set(npu_ops.names())
    assert _ANTIQUANT not in npu_ops.names()
    assert got == oracle.generate_greedy(_PROMPTS, 12, ignore_eos=True)


@pytest.mark.usefixtures("kept_in_float32")
@pytest.mark.often("awq-64", "w8a8-channel")
@pytest.mark.parametrize("scheme", [awq(64), gptq(8, -1), w8a8("channel"), modelslim("W8A8_MIX")], ids=lambda s: s.name)
def test_ranks_compute_with_their_cuts_of_the_codes(scheme: Scheme, tmp_path: Path, npu_ops: NpuOps) -> None:
    """A rank has 96 of 192 inner inputs: groups of 64 are divided, and those of all inputs are cut."""
    path = make_family("llama", tmp_path, intermediate_size=192)
    quantise_checkpoint(scheme, path)
    token_ids = torch.randint(3, 300, (1, 24), generator=torch.Generator().manual_seed(5))
    expected, *_ = rank_logits(path, 2, token_ids)
    npu_ops.calls.clear()

    own, *_ = rank_logits(path, 2, token_ids, formats=TRAITS.kept_linears)

    rounds = "w8a8" in scheme.name
    assert set(npu_ops.names()) & {_ANTIQUANT, *_W8A8} == (set(_W8A8) if rounds else {_ANTIQUANT})
    assert (own - expected).norm() < (0.05 if rounds else 1e-4) * expected.norm()


def _round_inputs(_layer: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    values = inputs[0].double()
    steps = values.abs().amax(-1, keepdim=True) / 127
    return ((torch.round(values / steps) * steps).float(),)


@pytest.mark.combinations(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("scheme", [awq(32), w8a8("channel"), modelslim("W8A8")], ids=lambda s: s.name)
def test_a_model_is_served_in_the_dtypes_of_npus(scheme: Scheme, dtype: str, tmp_path: Path, npu_ops: NpuOps) -> None:
    path = make_tiny_model("qwen2", tmp_path / "qwen2")
    quantise_checkpoint(scheme, path)

    loaded = _load(path, dtype)
    npu_ops.calls.clear()
    got = generate(loaded.model, _PROMPTS[:1], 3, chunk=16)

    assert ", kept: 14 of 14 quantised layers; " in _note(loaded)
    assert len(got[0]) == 3
    called = {"awq-32": {_ANTIQUANT}, "w8a8-channel": set(_W8A8), "modelslim-w8a8": set(_STATIC)}
    assert set(npu_ops.names()) & {_ANTIQUANT, *_W8A8, *_STATIC} == called[scheme.name]


def test_float32_is_dequantised_with_a_reason(tmp_path: Path) -> None:
    path = make_tiny_model("llama", tmp_path / "llama")
    quantise_checkpoint(awq(32), path)

    loaded = _load(path, "float32")

    assert "as npu_weight_quant_batchmatmul supports float16 and bfloat16, not float32: " in _note(loaded)
