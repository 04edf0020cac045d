"""Parts of networks by FlashInfer's stand-in and by torch, as on a GPU: tokens are transformers', the rest stays."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GemmaConfig,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    Qwen2Config,
    Qwen3Config,
)

from devices import flashinfer_package
from devices.interface import Traits
from engine.attention.registered import NAME, register
from engine.checkpoints.checkpoint import open_checkpoint
from engine.checkpoints.stored_weights import StoredWeights
from engine.cuda import flashinfer_ops
from engine.cuda.flashinfer_ops import FlashInferOps
from engine.cuda.torch_ops import TorchOps
from engine.loader import LoadedModel, load_model
from engine.modules import parts
from engine.modules.check import PartCheck
from engine.modules.interface import ModuleOps, NormWeight
from engine.modules.joined import JoinedLinear
from engine.modules.replace import replace_modules
from engine.network import load_network
from engine.oracle import Oracle
from engine.sharding.cut import shard_network
from tests.devices.fake_device import TRAITS, FakeDevice
from tests.engine import flashinfer_ops_stand_in
from tests.engine.small_networks import GQA, SIZES, logits, network
from tests.engine.step_runner import generate
from tests.engine.tiny_families import NAMED, OTHERS, make_family
from wire.kv_layout import Rank

_PROMPTS = [[5, 9, 200, 31, 7], list(range(40, 75))]
_NORMS, _ADDED = {"rmsnorm", "fused_add_rmsnorm"}, "apply_rope_with_cos_sin_cache"
_GEMMAS = {"gemma_rmsnorm", "gemma_fused_add_rmsnorm", "gelu_tanh_and_mul"}


@pytest.fixture(autouse=True)
def no_call_is_noted_yet() -> None:
    flashinfer_ops_stand_in.calls.clear()


@pytest.fixture
def in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the stand-in's kernels take float32. No real one does."""
    monkeypatch.setattr(flashinfer_ops_stand_in.Dtypes, "also_float32", True)
    monkeypatch.setattr(flashinfer_ops, "DTYPES", (*flashinfer_ops.DTYPES, torch.float32))


def flashinfer() -> FlashInferOps:
    return FlashInferOps(flashinfer_ops_stand_in, "flashinfer")


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def sizes_of(made: Any) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in made.state_dict().items()}


@pytest.mark.combinations(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("config", "ops"),
    [
        (lambda: LlamaConfig(**GQA), {*_NORMS, _ADDED, "silu_and_mul"}),
        (lambda: LlamaConfig(**GQA, mlp_bias=True, attention_bias=True), {*_NORMS, _ADDED, "silu_and_mul"}),
        (lambda: Qwen2Config(**GQA), {*_NORMS, _ADDED, "silu_and_mul"}),
        (lambda: Qwen3Config(**GQA, head_dim=128), {*_NORMS, _ADDED, "silu_and_mul"}),
        (lambda: GemmaConfig(**GQA, head_dim=16), {*_GEMMAS, _ADDED}),
        (lambda: Gemma2Config(**GQA, head_dim=16), {*_GEMMAS, _ADDED}),
    ],
    ids=["llama", "llama-bias", "qwen2", "qwen3", "gemma", "gemma2"],
)
def test_a_known_network_runs_by_library_ops_with_equal_output(
    config: Callable[[], Any], ops: set[str], dtype: torch.dtype
) -> None:
    made = network(config(), dtype)
    expected, names, sizes = logits(made), [name for name, _ in made.named_modules()], sizes_of(made)
    stored = {name: tensor.clone() for name, tensor in made.state_dict().items()}

    (line,) = replace_modules(made, (flashinfer(), TorchOps()))
    flashinfer_ops_stand_in.calls.clear()
    got = logits(made)

    norms = sum(type(module).__name__.endswith("RMSNorm") for module in made.modules())
    library = "torch" if dtype == torch.float32 else "flashinfer"
    assert line == f"by {library}: {norms} norms, 2 gated MLPs, 2 attentions, 2 layers"
    assert set(flashinfer_ops_stand_in.calls) == (set() if dtype == torch.float32 else ops)
    assert relative_error(got, expected) < {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]
    assert [name for name, _ in made.named_modules()] == names
    assert sizes_of(made) == sizes
    assert all(torch.equal(tensor, stored[name]) for name, tensor in made.state_dict().items())


def test_merged_weights_are_stored_once() -> None:
    made = network(LlamaConfig(**GQA, mlp_bias=True, attention_bias=True))
    before = sum(parameter.nbytes for parameter in made.parameters())

    replace_modules(made, (TorchOps(),))

    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in made.parameters()}
    assert sum(storage.nbytes() for storage in storages.values()) == before
    layer = made.model.layers[0]
    for joined in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        owner = layer.self_attn if "q_proj" in joined else layer.mlp
        places = {getattr(owner, name).weight.untyped_storage().data_ptr() for name in joined}
        assert len(places) == 1


def test_a_layer_makes_one_product_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    made = network(LlamaConfig(**GQA))
    replace_modules(made, (TorchOps(),))
    products: list[int] = []
    linear = nn.functional.linear

    def counted(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        products.append(weight.shape[0])
        return linear(rows, weight, bias)

    monkeypatch.setattr(nn.functional, "linear", counted)
    logits(made)

    assert products == [64 + 32 + 32, 64, 2 * 96, 64] * 2 + [64]


def _add_hooks(made: Any) -> None:
    made.model.layers[1].mlp.gate_proj.register_forward_hook(lambda *_: None)
    made.model.layers[1].self_attn.v_proj.register_forward_pre_hook(lambda *_: None)


class _Adapted(nn.Linear):
    """A linear layer with an addition, as adapters are."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 0.1 * input.mean(-1, keepdim=True)


def _add_adapters(made: Any) -> None:
    for owner, name in ((made.model.layers[1].mlp, "up_proj"), (made.model.layers[1].self_attn, "k_proj")):
        old = getattr(owner, name)
        new = _Adapted(old.in_features, old.out_features, bias=False)
        new.weight = old.weight
        setattr(owner, name, new)


def _tie_weights(made: Any) -> None:
    first, second = made.model.layers
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    second.self_attn.q_proj.weight = first.self_attn.q_proj.weight


def _widen_inputs(made: Any) -> None:
    layer = made.model.layers[1]
    layer.mlp.gate_proj.register_forward_pre_hook(lambda _, given: (given[0].double(),))
    layer.mlp.gate_proj.register_forward_hook(lambda _, given, out: out.float())
    layer.mlp.gate_proj.double()
    layer.self_attn.v_proj.bias = nn.Parameter(torch.ones(32))


@pytest.mark.parametrize(
    ("change", "mlps"),
    [(_add_hooks, 1), (_add_adapters, 1), (_tie_weights, 0), (_widen_inputs, 1)],
    ids=["hooks", "adapters", "tied", "mixed"],
)
def test_linear_layers_that_are_not_plain_are_not_merged(change: Callable[[Any], None], mlps: int) -> None:
    made = network(LlamaConfig(**GQA))
    change(made)
    expected = logits(made)
    places = {name: tensor.data_ptr() for name, tensor in made.named_parameters(remove_duplicate=False)}

    (line,) = replace_modules(made, (TorchOps(),))

    counted = f", {mlps} gated MLPs" if mlps else ""
    assert line == f"by torch: 5 norms{counted}, 2 attentions, 2 layers"
    torch.testing.assert_close(logits(made), expected, rtol=1e-4, atol=1e-5)
    moved = {name for name, tensor in made.named_parameters() if tensor.data_ptr() != places[name]}
    assert not any(name.startswith("model.layers.1.") for name in moved)


@pytest.mark.parametrize(
    "config",
    [
        lambda: OPTConfig(**SIZES, ffn_dim=96, word_embed_proj_dim=64),
        lambda: GPTNeoXConfig(**SIZES, intermediate_size=96),
    ],
    ids=["opt", "gpt-neox"],
)
def test_an_unknown_network_is_left_unchanged(config: Callable[[], Any]) -> None:
    made = network(config(), torch.bfloat16)
    expected = logits(made)

    assert replace_modules(made, (flashinfer(), TorchOps())) == ("by flashinfer: nothing",)

    torch.testing.assert_close(logits(made), expected, rtol=0, atol=0)
    assert flashinfer_ops_stand_in.calls == []


@pytest.mark.combinations(1)
@pytest.mark.parametrize(
    ("name", "expected_line"),
    [
        ("rmsnorm", "by flashinfer: 2 gated MLPs, 2 attentions; by torch: 5 norms, 2 layers"),
        ("silu_and_mul", "by flashinfer: 5 norms, 2 attentions, 2 layers; by torch: 2 gated MLPs"),
        (_ADDED, "by flashinfer: 5 norms, 2 gated MLPs, 2 layers; by torch: 2 attentions"),
        ("fused_add_rmsnorm", "by flashinfer: 5 norms, 2 gated MLPs, 2 attentions; by torch: 2 layers"),
    ],
)
@pytest.mark.parametrize("how", ["absent", "raises", "wrong"])
def test_torch_replaces_missing_or_wrong_library_ops(
    name: str, expected_line: str, how: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    right = getattr(flashinfer_ops_stand_in, name)

    def fail(*_: Any, **__: Any) -> None:
        calls.append(name)
        raise FileNotFoundError("nvcc")

    def wrong(*args: Any, **kwargs: Any) -> Any:
        made = right(*args, **kwargs)
        if made is None:
            args[0].mul_(1.5)
        return tuple(one * 1.5 for one in made) if isinstance(made, tuple) else None if made is None else made * 1.5

    if how == "absent":
        monkeypatch.delattr(flashinfer_ops_stand_in, name)
    else:
        monkeypatch.setattr(flashinfer_ops_stand_in, name, fail if how == "raises" else wrong)
    made = network(LlamaConfig(**GQA), torch.bfloat16)
    expected = logits(made)

    (line,) = replace_modules(made, (flashinfer(), TorchOps()))

    if name == "rmsnorm":
        expected_line = expected_line.replace("; by torch: 5 norms, 2 layers", "; by torch: 5 norms")
    assert line.replace(", 2 layers; by torch: 5 norms", "; by torch: 5 norms") == expected_line
    assert relative_error(logits(made), expected) < 3e-2
    assert len(calls) == (how == "raises"), "a library that raises is not tried again for parts of that kind"
    warnings = [record.getMessage().split()[0] for record in caplog.records]
    assert warnings == (["ops_disabled"] if how == "raises" else [])


@pytest.mark.parametrize("strided", [False, True], ids=["by-heads", "by-heads-of-a-split"])
def test_a_norm_that_is_wrong_by_heads_alone_is_found(strided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    right = flashinfer_ops_stand_in.rmsnorm

    def wrong(input: torch.Tensor, weight: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        by_heads = input.dim() == 3 and not (strided and input.is_contiguous())
        return right(input, weight, **kwargs) * (0.5 if by_heads else 1.0)

    monkeypatch.setattr(flashinfer_ops_stand_in, "rmsnorm", wrong)
    made = network(Qwen3Config(**GQA, head_dim=16), torch.bfloat16)
    expected = logits(made)

    (line,) = replace_modules(made, (flashinfer(), TorchOps()))

    assert line == "by flashinfer: 5 norms, 2 gated MLPs, 2 attentions, 2 layers; by torch: 4 norms"
    assert relative_error(logits(made), expected) < 3e-2


def test_a_norm_that_raises_by_heads_is_left_to_the_next_library(monkeypatch: pytest.MonkeyPatch) -> None:
    right = flashinfer_ops_stand_in.rmsnorm

    def raises(input: torch.Tensor, weight: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if input.dim() == 3:
            raise ValueError("no kernel of three dimensions")
        return right(input, weight, **kwargs)

    monkeypatch.setattr(flashinfer_ops_stand_in, "rmsnorm", raises)
    made = network(Qwen3Config(**GQA, head_dim=16), torch.bfloat16)

    (line,) = replace_modules(made, (flashinfer(), TorchOps()))

    assert line == "by flashinfer: 5 norms, 2 gated MLPs, 2 attentions, 2 layers; by torch: 4 norms"


def test_modules_equal_alone_but_not_together_are_restored(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Drifting(TorchOps):
        """Gates that are wrong in a network of several alone."""

        def gate(self, activation: str, dtype: torch.dtype) -> Any:
            right, calls = super().gate(activation, dtype), list[int]()
            assert right is not None

            def run(both: torch.Tensor) -> torch.Tensor:
                calls.append(1)
                return right(both) * (1 if len(calls) == 1 else 1.5)

            return run

    made = network(LlamaConfig(**GQA))
    expected = logits(made)

    (line,) = replace_modules(made, (Drifting(),))

    assert line == "by torch: 5 norms; not replaced: 2 layers, 2 attentions, 2 gated MLPs"
    torch.testing.assert_close(logits(made), expected, rtol=1e-4, atol=1e-5)
    assert [record.getMessage().split()[0] for record in caplog.records] == ["modules_put_back"] * 3


@pytest.mark.parametrize("family", ["hunyuan_v1_moe", "phimoe", "qwen3_moe"])
def test_a_few_tokens_rounded_to_other_experts_are_accepted(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    register()
    path = make_family(family, tmp_path / family)
    made = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation=NAME).eval()

    replace_modules(made, (flashinfer(), TorchOps()))

    assert "modules_put_back" not in caplog.text


@pytest.mark.parametrize("further", [(), (None,), "rows"], ids=["one-in-a-tuple", "none", "a-tensor"])
def test_a_layer_that_returns_more_than_its_rows_stays(further: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer_type = type(network(LlamaConfig(**GQA)).model.layers[0])
    forward = layer_type.forward

    def returns_more(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        return forward(self, hidden_states, **kwargs), *((hidden_states,) if further == "rows" else further)

    made = network(LlamaConfig(**GQA))
    monkeypatch.setattr(layer_type, "forward", returns_more)
    monkeypatch.setattr("engine.modules.check.PartCheck._logits", _logits_of_rows)

    (line,) = replace_modules(made, (TorchOps(),))

    assert line == "by torch: 5 norms, 2 gated MLPs, 2 attentions; not replaced: 2 layers"


@torch.inference_mode()
def _logits_of_rows(check: PartCheck) -> torch.Tensor:
    """Run a network whose layers return a tuple, as its own code would."""
    rows = check._network.get_input_embeddings()(torch.arange(19)[None])
    angles = check._network.model.rotary_emb(rows, torch.arange(19)[None])
    for layer in check._network.model.layers:
        output = layer(rows, position_embeddings=angles, attention_mask=None)
        rows = output[0] if isinstance(output, tuple) else output
    made: torch.Tensor = check._network.lm_head(check._network.model.norm(rows))
    return made.float()


def test_modules_no_library_computes_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    right = TorchOps.norm

    def wrong(self: TorchOps, weight: NormWeight) -> Any:
        norm = right(self, weight)
        return lambda rows: norm(rows) * 1.01  # type: ignore[misc]

    monkeypatch.setattr(TorchOps, "norm", wrong)
    made = network(LlamaConfig(**GQA))
    expected = logits(made)

    (line,) = replace_modules(made, (TorchOps(),))

    assert line == "by torch: 2 gated MLPs, 2 attentions; not replaced: 5 norms"
    torch.testing.assert_close(logits(made), expected, rtol=1e-4, atol=1e-5)


def test_layers_keep_their_inputs_where_others_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made = network(LlamaConfig(**GQA), torch.bfloat16)
    kept: dict[str, torch.Tensor] = {}
    embed, norm = type(made.model.embed_tokens).forward, made.model.norm.forward

    def remember(self: Any, ids: torch.Tensor) -> torch.Tensor:
        kept["rows"] = embed(self, ids)
        return kept["rows"]

    monkeypatch.setattr(type(made.model.embed_tokens), "forward", remember)
    made.model.norm.forward = lambda rows: norm(rows + kept["rows"])
    expected = logits(made)

    replace_modules(made, (flashinfer(), TorchOps()))

    layers = [layer.forward for layer in made.model.layers]
    assert [(type(layer), layer.overwrites, layer.keeps_input) for layer in layers] == [
        (parts.AddedLayer, True, True)
    ] * 2
    assert relative_error(logits(made), expected) < 3e-2


def test_layers_overwrite_inputs_no_one_else_reads() -> None:
    made = network(LlamaConfig(**GQA), torch.bfloat16)

    replace_modules(made, (flashinfer(), TorchOps()))

    assert [layer.forward.keeps_input for layer in made.model.layers] == [False, False]


def test_angles_are_concatenated_once_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = flashinfer()
    made = network(LlamaConfig(**GQA), torch.bfloat16)
    replace_modules(made, (ops, TorchOps()))
    tables: list[int] = []
    make = ops._angles._make

    def counted(cos: torch.Tensor, sin: torch.Tensor) -> Any:
        tables.append(cos.shape[1])
        return make(cos, sin)

    monkeypatch.setattr(ops._angles, "_make", counted)
    for num_tokens in (3, 3, 5):
        logits(made, num_tokens)

    assert tables == [3, 3, 5]


def test_queries_and_keys_come_out_of_a_rotation_in_one_piece() -> None:
    rotate = flashinfer().rotate(64, torch.bfloat16)
    assert rotate is not None
    rows = torch.randn(1, 5, 6 * 64).bfloat16()
    query, key, _ = (one.view(1, 5, -1, 64) for one in torch.split(rows, [256, 64, 64], -1))
    half = torch.randn(1, 5, 32)

    turned = rotate(query, key, torch.cat((half.cos(),) * 2, -1), torch.cat((half.sin(),) * 2, -1))

    assert [one.shape for one in turned] == [query.shape, key.shape]


def test_incompatible_layers_are_not_merged() -> None:
    plain = nn.Linear(8, 4, bias=False)

    assert JoinedLinear.of((plain, nn.Linear(8, 6, bias=False))) is not None
    assert JoinedLinear.of((plain, nn.Linear(8, 4))) is None
    assert JoinedLinear.of((plain, nn.Linear(6, 4, bias=False))) is None
    assert JoinedLinear.of((plain, nn.Linear(8, 4, bias=False).double())) is None
    assert JoinedLinear.of((plain, None)) is None
    assert JoinedLinear.of(()) is None


def cuda_like() -> FakeDevice:
    traits = Traits(
        kind="fake", visible_variable=None, collective="gloo", block_size=16, prefill_chunk_size=64,
        pool_alignment=TRAITS.pool_alignment, attention="cuda",
    )  # fmt: skip
    return FakeDevice(traits=traits)


def load(path: Path) -> LoadedModel:
    return load_model(
        path, dtype="float32", block_size=16, kv_cache_memory=4 << 20, num_threads=1, device=cuda_like()
    )  # fmt: skip


def _same_tokens(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Load the model with FlashInfer's modules, compare its tokens with the oracle's, and return the notes."""
    found = flashinfer_ops_stand_in, "flashinfer"
    monkeypatch.setattr("engine.cuda.modules.find_flashinfer", lambda: found)
    loaded = load(path)

    got = generate(loaded.model, _PROMPTS, 12, chunk=16)

    assert got == Oracle(path, "float32").generate_greedy(_PROMPTS, 12, ignore_eos=True)
    loaded.model.close()
    return loaded.notes


@pytest.mark.often("llama", "gemma2", "qwen3_moe")
@pytest.mark.usefixtures("in_float32")
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "gemma2", "gemma3_text", "qwen3_moe"])
def test_greedy_output_is_that_of_transformers(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = _same_tokens(make_family(family, tmp_path / family), monkeypatch)

    assert _ADDED in flashinfer_ops_stand_in.calls
    line = next(note for note in notes if note.startswith("by flashinfer: "))
    assert "norms" in line
    assert "4 attentions, 4 layers" in line
    assert "differ" not in line


@pytest.mark.long
@pytest.mark.usefixtures("in_float32")
@pytest.mark.parametrize("family", [*NAMED, *OTHERS])
def test_every_familys_output_is_that_of_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _same_tokens(make_family(family, tmp_path / family), monkeypatch)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_without_the_library_torch_does_it_all(family: str, tmp_path: Path) -> None:
    path = make_family(family, tmp_path / family)
    loaded = load(path)

    got = generate(loaded.model, _PROMPTS, 12, chunk=16)

    assert got == Oracle(path, "float32").generate_greedy(_PROMPTS, 12, ignore_eos=True)
    line = next(note for note in loaded.notes if note.startswith("by torch: "))
    assert line.endswith("4 gated MLPs, 4 attentions, 4 layers")


@pytest.mark.usefixtures("in_float32")
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
def test_a_sharded_network_sums_as_often_with_equal_output(family: str, number: int, tmp_path: Path) -> None:
    register()
    checkpoint, sums = open_checkpoint(make_family(family, tmp_path / family)), list[int]()
    rank = functools.partial(
        shard_network, config=checkpoint.text_config, rank=Rank(number, 2),
        all_reduce=lambda rows: sums.append(rows.shape[-1]),
    )  # fmt: skip
    with StoredWeights(checkpoint.path) as weights:
        made = load_network(checkpoint, weights, dtype="float32", attention=NAME, shard=rank).network
    sums.clear()
    expected, before = logits(made), [*sums]

    (line,) = replace_modules(made, (flashinfer(), TorchOps()))
    sums.clear()
    got = logits(made)

    assert "4 attentions, 4 layers" in line
    assert "differ" not in line
    assert relative_error(got, expected) < 1e-5
    assert sums == before != []


def test_a_library_that_does_not_import_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> None:
        raise OSError("libcudart.so.13: cannot open shared object file")

    assert flashinfer_package.find_flashinfer() == (None, "flashinfer is not installed")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    monkeypatch.setattr("importlib.import_module", fail)

    module, reason = flashinfer_package.find_flashinfer()

    assert module is None
    assert reason == "flashinfer cannot be used: libcudart.so.13: cannot open shared object file"


def test_both_libraries_implement_module_ops() -> None:
    libraries: tuple[ModuleOps, ...] = (flashinfer(), TorchOps())

    check = PartCheck(network(LlamaConfig(**GQA)))

    assert [ops.name for ops in libraries] == ["flashinfer", "torch"]
    assert check.shared == frozenset()
