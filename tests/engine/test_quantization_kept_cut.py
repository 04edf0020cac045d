"""Quantised layers of ranks: each rank keeps its cut of the codes, in even groups, and together they are the model."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine.checkpoints.materialise import DimensionRanges
from engine.checkpoints.stored_weights import StoredWeights
from engine.oracle import load_plain
from engine.quantization.detect import find_quantization
from engine.quantization.interface import EvenGroups, Grouped
from engine.quantization.kept import KeptLinear, KeptWeight, kept_weight
from engine.quantization.kept_cut import read_cut
from engine.quantization.kept_rounded import INT8_BY_TORCH, RoundedFormat
from engine.quantization.weights import DequantisingWeights
from tests.engine.rank_logits import load_rank, rank_logits
from tests.engine.tiny_families import make_family
from tests.engine.tiny_models import make_tiny_model
from tests.engine.tiny_quantised import SCHEMES, Scheme, awq, fp8, gptq, modelslim, packed, quantise_checkpoint, w8a8
from wire.kv_layout import Rank

_HOST = ("int4pack-host", "int8", "float8")
_DOWN = "model.layers.0.mlp.down_proj.weight"  # [64, 96]
_WIDE = {"intermediate_size": 128}  # two ranks' inner sizes are whole multiples of 32, as int4pack requires
_CUTS = {
    "whole": None,
    "outputs": DimensionRanges(0, ((16, 48),)),
    "fused outputs": DimensionRanges(0, ((0, 8), (24, 40), (63, 64))),
    "inputs at a group": DimensionRanges(1, ((32, 96),)),
    "inputs within groups": DimensionRanges(1, ((8, 72),)),
    "inputs in a word": DimensionRanges(1, ((5, 70),)),
    "inputs in one group": DimensionRanges(1, ((33, 47),)),
}


@pytest.fixture(scope="module", params=SCHEMES, ids=lambda scheme: scheme.name)
def stored(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Scheme, torch.Tensor]:
    """A checkpoint of each scheme, and what one of its weights must be read as."""
    path = make_tiny_model("llama", tmp_path_factory.mktemp("llama"))
    return path, request.param, quantise_checkpoint(request.param, path)[_DOWN]


@pytest.mark.parametrize("cut", _CUTS.values(), ids=_CUTS)
def test_a_cut_of_any_layout_has_the_weights_of_its_slice(
    cut: DimensionRanges | None, stored: tuple[Path, Scheme, torch.Tensor]
) -> None:
    path, scheme, whole = stored
    layout = find_quantization(path, None)
    assert layout is not None
    with StoredWeights(path) as weights:
        module = DequantisingWeights(weights, layout, torch.float32).module(_DOWN)
        assert module is not None
        grouped = read_cut(module, cut)
    expected = whole
    if cut is not None:
        expected = torch.cat([whole.narrow(cut.dim, start, end - start) for start, end in cut.ranges], cut.dim)

    weight = kept_weight(grouped, rounded_inputs=None)

    if isinstance(weight, str):
        assert "act order leaves" in weight
        assert scheme.name.endswith("ordered")
        assert cut is not None
        assert cut.dim == 1
    else:
        assert torch.equal(_widened(weight, expected.shape[1]), expected.double())


def _widened(weight: KeptWeight, inputs: int) -> torch.Tensor:
    """Return the weight in float64 in the order of its inputs; inputs beyond these are padding."""
    groups = torch.arange(weight.shape[1]) // weight.group_size
    assert weight.scales.shape[1] == groups[-1] + 1
    zeros = 0 if weight.zeros is None else weight.zeros.double()[:, groups]
    values = ((weight.codes.double() - zeros) * weight.scales.double()[:, groups]).float().double()  # as stored
    if weight.order is None:
        return values
    made = torch.zeros(len(values), inputs + 1, dtype=torch.float64)
    made[:, weight.order] = values
    assert (weight.order < inputs).sum() == inputs
    return made[:, :inputs]


@pytest.mark.parametrize(
    ("groups", "size", "stored_groups"),
    [
        (EvenGroups(64), 64, [0, 1, 2]),
        (EvenGroups(128), 64, [0, 0, 1]),
        (EvenGroups(128, 64), 64, [0, 1, 1]),
        (EvenGroups(128, 96), 32, [0, 1, 1, 1, 1, 2]),
        (EvenGroups(256, 64), 192, [0]),
        (EvenGroups(80), 16, [0] * 5 + [1] * 5 + [2] * 2),
        (torch.arange(192) % 3, 64, [0, 1, 2]),
        (torch.tensor([0] * 64 + [2] * 128), 64, [0, 2, 2]),
        (torch.arange(192) % 12, 16, [*range(12)]),
        (torch.tensor([1] * 30 + [3] * 70 + [0] * 92), 32, [0, 0, 0, 1, 3, 3, 3]),
    ],
    ids=str,
)
def test_groups_are_divided_or_padded_until_they_are_even(
    groups: EvenGroups | torch.Tensor, size: int, stored_groups: list[int]
) -> None:
    codes = torch.randint(1, 16, (8, 192), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scales = torch.arange(12.0).repeat(8, 1) + 1

    weight = kept_weight(Grouped(codes, scales, None, groups), rounded_inputs=None)

    assert isinstance(weight, KeptWeight)
    assert (weight.group_size, weight.scales[0].tolist()) == (size, [one + 1.0 for one in stored_groups])
    assert weight.shape[1] == size * len(stored_groups)


def test_act_order_that_needs_mostly_padding_is_not_kept() -> None:
    """As with many ranks: of each group a rank has a few inputs."""
    groups = torch.arange(64) % 9

    weight = kept_weight(Grouped(torch.ones(8, 64), torch.ones(8, 9), None, groups), rounded_inputs=None)

    assert weight == "act order leaves 64 inputs in 9 groups of different sizes"


_KEPT: tuple[tuple[str, Scheme, int, dict[str, Any]], ...] = (
    ("llama", awq(32), 2, _WIDE),
    ("llama", awq(64), 2, {"intermediate_size": 192}),  # 96 inner inputs of a rank: one and a half groups
    ("llama", gptq(4, 32), 2, _WIDE),
    ("llama", gptq(4, 32, version="gptq_v2", act_order=True), 2, _WIDE),
    ("llama", packed(4, 32, symmetric=False), 2, _WIDE),
    ("llama", packed(4, 64, act_order=True), 2, _WIDE),
    ("qwen2", awq(32), 2, _WIDE),  # biases of queries, keys and values
    ("phi3", gptq(4, 32), 2, _WIDE),  # fused projections
    ("llama", awq(32), 4, {"head_dim": 32, "intermediate_size": 128}),  # KV heads are repeated
)


@pytest.mark.often("llama-packed-4-64-ordered-2", "phi3-gptq-4-32-2")
@pytest.mark.parametrize(
    ("kind", "scheme", "num_ranks", "sizes"), _KEPT, ids=[f"{kind}-{scheme.name}-{of}" for kind, scheme, of, _ in _KEPT]
)
def test_ranks_that_keep_their_layers_are_the_dequantised_model(
    kind: str, scheme: Scheme, num_ranks: int, sizes: dict[str, Any], tmp_path: Path
) -> None:
    path = make_family(kind, tmp_path, **sizes, num_hidden_layers=2)
    plain = load_plain(path, "float32")
    plain.load_state_dict(quantise_checkpoint(scheme, path))
    token_ids = _token_ids()
    with torch.inference_mode():
        expected = plain(input_ids=token_ids, use_cache=False).logits

    own, *_ = rank_logits(path, num_ranks, token_ids, formats=_HOST)

    torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)
    for number in range(num_ranks):
        network = load_rank(path, Rank(number, num_ranks), _no_sum, formats=_HOST)
        assert [name for name, layer in network.named_modules() if type(layer) is nn.Linear] == ["lm_head"]


def _token_ids() -> torch.Tensor:
    return torch.randint(3, 300, (1, 24), generator=torch.Generator().manual_seed(5))


def _no_sum(_: torch.Tensor) -> None:
    pass


@pytest.mark.often("modelslim-w8a8_mix", "fp8-channel")
@pytest.mark.parametrize(
    "scheme", [w8a8("channel"), w8a8("tensor"), modelslim("W8A8_MIX"), fp8(None)], ids=lambda scheme: scheme.name
)
def test_ranks_round_their_own_part_of_a_token(scheme: Scheme, tmp_path: Path) -> None:
    """The layers that a row cut divides round each rank's inputs by their own maximum; the others as one rank does.

    Where an input is between two steps, one bit of a sum decides; so few logits may be a step off.
    """
    path = make_family("llama", tmp_path, **_WIDE)
    plain = load_plain(path, "float32")
    plain.load_state_dict(quantise_checkpoint(scheme, path))
    by_whole_rows, by_ranks = (_rounded_logits(plain, scheme, num_parts) for num_parts in (1, 2))

    own, _ = rank_logits(path, 2, _token_ids(), formats=_HOST)

    assert (own - by_ranks).norm() < 0.1 * (own - by_whole_rows).norm()
    assert (own - by_whole_rows).norm() < (0.5 if scheme.name.startswith("fp8") else 0.1) * own.norm()


def _rounded_logits(plain: Any, scheme: Scheme, num_parts: int) -> torch.Tensor:
    """The logits of transformers' network where inputs are rounded, by parts in layers that ranks cut by inputs."""
    hooks = [
        layer.register_forward_pre_hook(
            _rounding(num_parts if name.endswith(("o_proj", "down_proj")) else 1, scheme.name.startswith("fp8"))
        )
        for name, layer in plain.named_modules() if isinstance(layer, nn.Linear) and name != "lm_head"
    ]  # fmt: skip
    with torch.inference_mode():
        made: torch.Tensor = plain(input_ids=_token_ids(), use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return made


def _rounding(num_parts: int, to_float8: bool) -> Callable[[nn.Module, tuple[torch.Tensor]], tuple[torch.Tensor]]:
    def hook(_layer: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        parts = inputs[0].reshape(*inputs[0].shape[:-1], num_parts, -1)
        steps = parts.abs().amax(-1, keepdim=True) / (448 if to_float8 else 127)
        scaled = parts / steps
        rounded = scaled.to(torch.float8_e4m3fn).float() if to_float8 else torch.round(scaled)
        return ((rounded * steps).flatten(-2),)

    return hook


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_err_no_more_than_one_rank_may(num_ranks: int) -> None:
    """A rank's largest input is at most its token's: the bound of one rank, half a step an input, holds for any cut."""
    numbers = torch.Generator().manual_seed(3)
    codes = torch.randint(-127, 128, (24, 128), dtype=torch.int8, generator=numbers)
    scales = torch.rand(24, 1, generator=numbers) * 0.01 + 1e-3
    rows = torch.randn(16, 128, generator=numbers) * torch.logspace(0, -3, 128)
    matrix = codes.double() * scales.double()

    got = torch.zeros(16, 24, dtype=torch.float64)
    for part in torch.arange(128).chunk(num_ranks):
        weight = kept_weight(Grouped(codes[:, part], scales, None, EvenGroups(128)), rounded_inputs=torch.int8)
        assert isinstance(weight, KeptWeight)
        got += RoundedFormat(INT8_BY_TORCH).pack(weight, torch.float32)(rows[:, part]).double()

    bound = rows.double().abs().amax(1, keepdim=True) / 254 * matrix.abs().sum(1)
    assert ((got - rows.double() @ matrix.t()).abs() <= bound * 1.001).all()


@pytest.mark.combinations(1)
@pytest.mark.parametrize(
    ("scheme", "bits"),
    [(awq(32), 4 + 32 / 32), (gptq(4, 64), 4 + 32 / 64), (w8a8("channel"), 8), (fp8(None), 8)],
    ids=lambda value: getattr(value, "name", None),
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_rank_holds_its_share_of_the_codes(scheme: Scheme, bits: float, num_ranks: int, tmp_path: Path) -> None:
    """A group of 4-bit weights has two numbers of 16 bits; of 8-bit weights, each output has one of 32 on each rank."""
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}
    path = make_family("llama", tmp_path, **sizes, intermediate_size=256, num_hidden_layers=1)
    quantise_checkpoint(scheme, path)
    elements = 4 * 128 * 128 + 3 * 128 * 256
    outputs = 3 * 128 + 2 * 256 + 2 * 128 * num_ranks  # of layers cut by outputs, and by inputs
    expected = elements * bits / 8 + (outputs * 4 if bits == 8 else 0)

    held = [
        sum(layer.num_bytes for layer in network.modules() if isinstance(layer, KeptLinear))
        for number in range(num_ranks)
        for network in [load_rank(path, Rank(number, num_ranks), _no_sum, dtype="bfloat16", formats=_HOST)]
    ]

    assert held == [expected / num_ranks] * num_ranks


def test_experts_of_ranks_are_dequantised_beside_kept_attention(tmp_path: Path) -> None:
    path = make_family("mixtral", tmp_path)
    quantise_checkpoint(replace(awq(32), ignore=("lm_head", "gate")), path)

    expected, own = (rank_logits(path, 2, _token_ids(), formats=formats)[0] for formats in ((), _HOST))

    torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)
    network = load_rank(path, Rank(1, 2), _no_sum, formats=_HOST)
    kept = {name.rpartition(".")[2] for name, layer in network.named_modules() if isinstance(layer, KeptLinear)}
    assert kept == {"q_proj", "k_proj", "v_proj", "o_proj"}
