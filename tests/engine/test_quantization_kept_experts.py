"""Experts that stay quantised: against plain arithmetic, whole models against transformers', memory, and refusals."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from engine.loader import LoadedModel, load_model
from engine.model_folder import open_folder, read_network
from engine.oracle import Oracle
from engine.quantization import compact, kept_table
from engine.quantization.arithmetic import dequantise
from engine.quantization.compact import CompactWeights, compact_experts, compact_linear, grouped_of, joined
from engine.quantization.interface import EvenGroups, Grouped, StaticInputs
from engine.quantization.kept import KeptWeight, kept_weight
from engine.quantization.kept_blocks import WidenedLinear
from engine.quantization.kept_experts import KeptExperts, WidenedExperts, WidenedKernel
from engine.quantization.kept_experts_load import choose_format
from tests.devices import card
from tests.devices.card_device import CardDevice
from tests.devices.fake_device import TRAITS, FakeDevice
from tests.engine.card_float8 import CardFloat8
from tests.engine.rank_logits import load_rank, rank_logits
from tests.engine.step_runner import generate
from tests.engine.test_quantization_kept import float8_layer, int4_layer, int8_layer, rows_of
from tests.engine.tiny_families import make_family
from tests.engine.tiny_quantised import Scheme, awq, fp8, gptq, hf_fp8, modelslim, packed, quantise_checkpoint, w8a8
from wire.kv_layout import Rank

_PROMPTS = [[5, 9, 200, 31, 7], [17] * 3 + [4, 250, 96, 12, 300, 44], list(range(40, 75))]
_FORMATS = ("int4pack-host", "widened", "experts-widened")
_CPU = torch.device("cpu")
_STATIC = StaticInputs(0.1, 3, torch.ones(24), None)
_IGNORED = ("lm_head", "gate", "shared_expert_gate")


def _make(family: str, path: Path, scheme: Scheme, **sizes: Any) -> Path:
    folder = make_family(family, path / family, num_hidden_layers=2, **sizes)
    quantise_checkpoint(replace(scheme, ignore=_IGNORED), folder)
    return folder


def _load(path: Path, formats: tuple[str, ...] = _FORMATS, dtype: str = "float32") -> LoadedModel:
    device = FakeDevice(traits=replace(TRAITS, kept_linears=formats))
    return load_model(path, dtype=dtype, block_size=32, kv_cache_memory=1 << 20, num_threads=1, device=device)


def _note(loaded: LoadedModel) -> str:
    (note,) = (note for note in loaded.notes if "kept" in note or "dequantised" in note)
    return note


def block_layer(outputs: int, inputs: int, rows: int, columns: int, *, seed: int = 0) -> Grouped:
    """A random float8 weight with one scale per block of `rows` x `columns`."""
    numbers = torch.Generator().manual_seed(seed)
    codes = torch.randn(outputs, inputs, generator=numbers).mul(100).clamp(-448, 448).to(torch.float8_e4m3fn)
    blocks = torch.rand(-(-outputs // rows), -(-inputs // columns), generator=numbers) * 0.01 + 1e-3
    return Grouped(codes, blocks.repeat_interleave(rows, 0)[:outputs], None, EvenGroups(columns))


def _weight(grouped: Grouped, rounded_inputs: torch.dtype | None = None) -> KeptWeight:
    weight = kept_weight(grouped, rounded_inputs=rounded_inputs)
    assert isinstance(weight, KeptWeight), weight
    return weight


def _experts(make: Callable[[int], Grouped], num: int, rounded: torch.dtype | None = None) -> CompactWeights:
    weights = compact_experts([_weight(make(number), rounded) for number in range(num)], num, _CPU)
    assert isinstance(weights, CompactWeights), weights
    return weights


_LAYERS: dict[str, Callable[[int], Grouped]] = {
    "4 bits": lambda seed: int4_layer(24, 96, 32, seed=seed),
    "4 bits without zeros": lambda seed: replace(int4_layer(24, 96, 32, seed=seed), zeros=None),
    "int8": lambda seed: int8_layer(24, 96, seed=seed),
    "float8 by output": lambda seed: float8_layer(24, 96),
    "float8 by block": lambda seed: block_layer(24, 96, 8, 32, seed=seed),
    "float8 in cut blocks": lambda seed: block_layer(24, 96, 16, 64, seed=seed),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("make", _LAYERS.values(), ids=_LAYERS)
def test_widened_codes_are_the_dequantised_weights(make: Callable[[int], Grouped], dtype: torch.dtype) -> None:
    expected = torch.stack([dequantise(make(number), dtype) for number in range(5)])

    weights = _experts(make, 5)

    assert weights.shape == (5, 24, 96)
    assert torch.equal(weights.widened(slice(1, 4), dtype), expected[1:4])
    chosen = torch.tensor([4, 0, 4])
    assert torch.equal(weights.widened(chosen, dtype), expected[chosen])


@pytest.mark.parametrize(
    ("make", "num_bytes"),
    [
        (_LAYERS["4 bits"], 24 * 96 // 2 + 24 * 3 * (2 + 1)),
        (_LAYERS["4 bits without zeros"], 24 * 96 // 2 + 24 * 3 * 2),
        (_LAYERS["int8"], 24 * 96 + 24 * 2),
        (_LAYERS["float8 by block"], 24 * 96 + 3 * 3 * 4),
        (_LAYERS["float8 in cut blocks"], 24 * 96 + 3 * 3 * 4),  # 24 rows in blocks of 16, 96 inputs in 64: 8 and 32
    ],
)
def test_experts_hold_codes_and_one_scale_for_each_block(make: Callable[[int], Grouped], num_bytes: int) -> None:
    weights = _experts(make, 5)

    assert KeptExperts(WidenedKernel(weights), rounds_inputs=False).num_bytes == 5 * num_bytes
    if weights.codes.dtype == torch.float8_e4m3fn:
        assert WidenedLinear(compact_linear(_weight(make(0)))).num_bytes == num_bytes


@pytest.mark.parametrize("at_once", [1, 2, 8])
@pytest.mark.parametrize(
    "counts", [(0, 3, 0, 1, 0), (2, 0, 9, 4, 1), (0, 0, 0, 0, 7), (7, 0, 0, 0, 0), (1, 1, 1, 1, 1), (0, 0, 1, 0, 0)]
)
@pytest.mark.parametrize("make", [_LAYERS["4 bits"], _LAYERS["float8 by block"]], ids=["4 bits", "float8"])
def test_each_row_is_multiplied_by_its_experts_weight(
    make: Callable[[int], Grouped], counts: tuple[int, ...], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compact, "SCRATCH_BYTES", at_once * 24 * 96 * 4)
    weights, rows = _experts(make, 5), rows_of(sum(counts), 96, torch.float32)
    assert weights.in_scratch(torch.float32) == at_once
    matrices = [dequantise(make(number), torch.float32).double() for number in range(5)]
    expected = torch.cat(
        [part.double() @ matrix.t() for part, matrix in zip(rows.split_with_sizes(counts), matrices, strict=True)]
    )

    got = WidenedKernel(weights)(rows, torch.tensor(counts).cumsum(0))

    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


_SPOILT: dict[str, Callable[[CompactWeights], CompactWeights]] = {
    "another output's scale": lambda weights: replace(weights, scales=weights.scales.roll(1, 1)),
    "another expert's codes": lambda weights: replace(weights, codes=weights.codes.roll(1, 0)),
    "halves of a byte swapped": lambda weights: replace(weights, codes=weights.codes << 4 | weights.codes >> 4),
    "other values": lambda weights: replace(
        weights, pairs=None if weights.pairs is None else weights.pairs.roll(16, 0)
    ),
}


@pytest.mark.parametrize("spoil", _SPOILT.values(), ids=_SPOILT)
def test_experts_that_compute_something_else_are_not_kept(spoil: Callable[[CompactWeights], CompactWeights]) -> None:
    weights = _experts(_LAYERS["4 bits"], 5)
    checked = {number: _weight(_LAYERS["4 bits"](number)) for number in (0, 4)}

    made, why = (
        choose_format(one, checked, [WidenedExperts()], None, torch.float32) for one in (weights, spoil(weights))
    )

    assert isinstance(made, KeptExperts)
    assert "rounding explains only" in str(why)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_float8_experts_are_multiplied_by_the_rules_of_torch(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    card_ops, rounded = CardFloat8(), torch.float8_e4m3fn
    monkeypatch.setattr(torch, "_scaled_grouped_mm", card_ops.scaled_grouped_mm)
    form = kept_table.EXPERTS["experts-float8"]
    layer = float8_layer(48, 96)
    weights = _experts(lambda _: layer, 5, rounded)
    assert form.handles(weights, rounded)
    assert not form.handles(weights, None)

    made = choose_format(weights, {0: _weight(layer, rounded)}, [form], rounded, dtype)

    if dtype == torch.float32:
        assert made == "_scaled_grouped_mm returns bfloat16, not float32"
        return
    assert isinstance(made, KeptExperts), made
    assert made.num_bytes == 5 * (48 * 96 + 48 * 4)
    assert card_ops.num_products > 0
    spoilt = replace(weights, scales=weights.scales * 1.3)
    assert "rounding explains only" in str(choose_format(spoilt, {0: _weight(layer, rounded)}, [form], rounded, dtype))


def test_float8_experts_fit_torchs_shape_function() -> None:
    with FakeTensorMode():
        codes = torch.empty(5, 48, 96, dtype=torch.float8_e4m3fn, device="cuda")
        weights = CompactWeights(codes, torch.empty(5, 6, 1, device="cuda"), None)
        kernel = kept_table.EXPERTS["experts-float8"].pack(weights, torch.bfloat16)
        ends = torch.empty(5, dtype=torch.int64, device="cuda")
        made = kernel(torch.empty(7, 96, dtype=torch.bfloat16, device="cuda"), ends)

    assert (made.shape, made.dtype) == ((7, 48), torch.bfloat16)


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (replace(int4_layer(24, 96, 32), groups=torch.arange(96) % 3), "experts in act order have no kernel"),
        (int4_layer(24, 96, 48), "experts of one layer are stored in different forms"),
        (replace(int4_layer(24, 96, 32), codes=torch.full((24, 96), 200, dtype=torch.uint8)), "different forms"),
        (float8_layer(24, 96), "different forms"),
        (replace(int4_layer(24, 96, 32), static=_STATIC), "experts with static inputs have no kernel"),
    ],
)
def test_experts_without_a_common_form_are_dequantised(second: Grouped, why: str) -> None:
    weights = [_weight(int4_layer(24, 96, 32)), _weight(second)]

    assert why in str(compact_experts(weights, 2, _CPU))
    if second.static is None and (why != "different forms" or second.codes.is_floating_point()):
        assert why in str(joined(weights))


def test_parts_of_which_one_has_no_zeros_are_joined() -> None:
    layers = [int4_layer(24, 96, 32), replace(int4_layer(8, 96, 32, seed=1), zeros=None)]

    weight = joined(_weight(layer) for layer in layers)

    assert isinstance(weight, KeptWeight)
    expected = torch.cat([dequantise(layer, torch.float32) for layer in layers])
    assert torch.equal(dequantise(grouped_of(weight), torch.float32), expected)


_MODELS = (
    ("mixtral", awq(32), True),
    ("mixtral", gptq(3, 32), True),
    ("mixtral", packed(4, 32, symmetric=False), True),
    ("mixtral", hf_fp8((24, 40)), True),
    ("qwen3_moe", hf_fp8((32, 32)), True),
    ("qwen2_moe", gptq(4, 32), True),
    ("deepseek_v3", hf_fp8((32, 32)), False),  # latents of 16 inputs are one block
)


@pytest.mark.often("mixtral-awq-32", "deepseek_v3-hf-fp8-block")
@pytest.mark.parametrize(("family", "scheme", "all_kept"), _MODELS, ids=[f"{one[0]}-{one[1].name}" for one in _MODELS])
def test_tokens_equal_transformers_on_the_dequantised_weights(
    family: str, scheme: Scheme, all_kept: bool, tmp_path: Path
) -> None:
    path = _make(family, tmp_path, scheme, moe_intermediate_size=64, shared_expert_intermediate_size=64)

    loaded = _load(path)

    assert ", kept: " in _note(loaded)
    assert ("; weights take " in _note(loaded) and " dequantised to float32: " not in _note(loaded)) == all_kept
    got = generate(loaded.model, _PROMPTS, 12, chunk=16)
    assert got == Oracle(path, "float32").generate_greedy(_PROMPTS, 12, ignore_eos=True)


@pytest.mark.often("modelslim-w8a16-", "fp8-channel-")
@pytest.mark.parametrize(
    ("scheme", "kept"),
    [(w8a8("channel"), 24), (w8a8("group"), 24), (fp8(None), 24), (modelslim("W8A16"), 24)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_experts_are_kept_beside_layers_without_a_kernel(scheme: Scheme, kept: int, tmp_path: Path) -> None:
    path = _make("mixtral", tmp_path, scheme)

    loaded = _load(path, ("experts-widened",))

    assert f", kept: {kept} of 32 quantised layers; " in _note(loaded)
    assert "8 dequantised to float32: there is no kernel for " in _note(loaded)
    assert "rounded" not in _note(loaded)
    got = generate(loaded.model, _PROMPTS, 12, chunk=16)
    assert got == Oracle(path, "float32").generate_greedy(_PROMPTS, 12, ignore_eos=True)


@pytest.mark.often("mixtral-awq-32-2", "deepseek_v3-hf-fp8-block-2")
@pytest.mark.parametrize(
    ("family", "scheme", "num_ranks"),
    [
        ("mixtral", awq(32), 2),  # of 96 inner inputs a rank has one and a half groups
        pytest.param("mixtral", hf_fp8((32, 32)), 2, marks=pytest.mark.long),
        ("mixtral", hf_fp8((24, 40)), 4),
        ("qwen3_moe", hf_fp8((32, 32)), 2),
        ("deepseek_v3", hf_fp8((32, 32)), 2),
        ("qwen2_moe", gptq(4, 32), 2),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_ranks_that_keep_experts_are_the_dequantised_model(
    family: str, scheme: Scheme, num_ranks: int, tmp_path: Path
) -> None:
    """Each next token of the whole model's text is the ranks' too, so theirs is the same text."""
    path = _make(family, tmp_path, scheme)
    (text,) = Oracle(path, "float32").generate_greedy(_PROMPTS[2:], 12, ignore_eos=True)
    token_ids = torch.tensor([_PROMPTS[2] + text])
    expected = rank_logits(path, 1, token_ids)[0]

    own, *_ = rank_logits(path, num_ranks, token_ids, formats=_FORMATS)

    torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)
    assert own[0, len(_PROMPTS[2]) - 1 : -1].argmax(-1).tolist() == text
    for number in range(num_ranks):
        network = load_rank(path, Rank(number, num_ranks), lambda _: None, formats=_FORMATS)
        assert sum(isinstance(module, KeptExperts) for module in network.modules()) == _num_experts(family)


def _num_experts(family: str) -> int:
    """Two for each layer of experts; the first of two layers has none in these families."""
    return 2 if family in ("deepseek_v3", "qwen2_moe") else 4


@pytest.mark.combinations(1)
@pytest.mark.parametrize(
    ("scheme", "bits"),
    [(awq(32), 4 + (16 + 8) / 32), (hf_fp8((32, 32)), 8 + 32 / 32**2), (w8a8("group"), 8 + 16 / 16)],
    ids=lambda value: getattr(value, "name", ""),
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_rank_holds_codes_and_scales_of_its_share(
    scheme: Scheme, bits: float, num_ranks: int, tmp_path: Path
) -> None:
    """A group of 4-bit weights has a scale of 16 bits and a zero of 8."""
    path = _make("mixtral", tmp_path, scheme, intermediate_size=128)
    elements = 2 * 4 * 3 * 64 * 128

    for number in range(num_ranks):
        network = load_rank(path, Rank(number, num_ranks), lambda _: None, dtype="bfloat16", formats=_FORMATS)
        held = [module.num_bytes for module in network.modules() if isinstance(module, KeptExperts)]

        assert sum(held) == elements * bits / 8 / num_ranks
        assert not [name for name, _ in network.named_parameters() if "experts" in name]


def test_the_memory_of_kept_experts_is_counted(tmp_path: Path) -> None:
    path = _make("mixtral", tmp_path, hf_fp8((32, 32)))

    network = read_network(open_folder(path), "bfloat16", kept_linears=_FORMATS)

    floats = sum(tensor.nbytes for tensor in network.loaded.network.parameters())
    total = (floats + network.kept_bytes) / 2**20
    assert f"weights take {total:.1f} MiB of memory, or " in network.notes[0]


def test_a_kernel_that_the_device_refuses_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise ValueError("only supported on CUDA devices with compute capability = [9.0, 10.0]\nmore")

    path = _make("mixtral", tmp_path, fp8(None))
    monkeypatch.setattr(torch, "_scaled_grouped_mm", refuse)

    loaded, fallen_back = (
        _load(path, formats, "bfloat16") for formats in (("experts-float8",), ("experts-float8", "experts-widened"))
    )

    assert "as only supported on CUDA devices with compute capability = [9.0, 10.0]: " in _note(loaded)
    assert ", kept: 24 of 32 " in _note(fallen_back)


def test_host_and_device_never_wait_for_each_other_in_experts(tmp_path: Path) -> None:
    path = _make("mixtral", tmp_path, awq(32))
    device = CardDevice(kept_linears=_FORMATS)

    loaded = load_model(
        path, dtype="float32", block_size=32, kv_cache_memory=1 << 20, num_threads=1, device=device
    )  # fmt: skip
    with card.count_copies() as seen:
        got = generate(loaded.model, _PROMPTS[1:2], 3, chunk=16)

    assert ", kept: 32 of 32" in _note(loaded)
    assert not [
        place for place in seen.reads + seen.waited_uploads if "/quantization/" in place or "/modules/" in place
    ]
    assert got == generate(_load(path).model, _PROMPTS[1:2], 3, chunk=16)
