"""Quantises tiny checkpoints in each layout by plain numpy and whole numbers, independent of what the product reads by.

quantise_checkpoint(gptq(4, 32), folder)    # replaces the weights of `folder`; returns what they must be read as
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

Array = NDArray[Any]
Stored = dict[str, torch.Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
MODELSLIM_STEP, MODELSLIM_ZERO = np.float32(0.037), -9
"""The input_scale and input_offset of every static layer."""


@dataclass(frozen=True)
class Scheme:
    """One way of quantising: how a weight [outputs, inputs] is stored and read back, and what config.json says."""

    name: str
    pack: Callable[[Array], tuple[Stored, Array]]
    config: dict[str, Any]
    ignore: tuple[str, ...] = field(default=("lm_head",))

    @property
    def method(self) -> str:
        """Its name on the command line; ModelSlim does not write one."""
        return str(self.config.get("quant_method", "modelslim"))


def quantise_checkpoint(scheme: Scheme, folder: Path, *, note_in: str | None = None) -> Stored:
    """Quantise every linear weight of `folder` but the ignored; return all weights as they must be read.

    `note_in` names the file that says so instead of config.json.
    """
    stored: Stored = {}
    expected: Stored = {}
    for name, values in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if values.dim() != 2 or module.split(".")[-1] in (*scheme.ignore, "embed_tokens"):
            stored[name] = expected[name] = values
            continue
        tensors, read = scheme.pack(values.numpy())
        stored.update({f"{module}.{part}": tensor.contiguous() for part, tensor in tensors.items()})
        expected[name] = torch.from_numpy(read.astype(np.float32))
    _fold_biases(stored, {name: tensor for name, tensor in stored.items() if name.endswith(".bias")})
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = scheme.config
    if scheme.method == "modelslim":
        note_in, kind = "quant_model_description.json", config["model_quant_type"]
        config = {key: value for key, value in config.items() if "." not in key}
        config |= {name: "FLOAT" if stored[name] is expected.get(name) else kind for name in stored}
    _write_config(folder, config, note_in)
    return expected


def _write_config(folder: Path, config: dict[str, Any], note_in: str | None) -> None:
    if note_in is not None:
        (folder / note_in).write_text(json.dumps(config))
        return
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": config}))


def words_of(codes: Array, bits: int) -> Array:
    """Pack the last dimension into int32 words: all bits of all codes in a row, the lowest first, cut into words."""
    stream = (codes[..., None] >> np.arange(bits) & 1).reshape(*codes.shape[:-1], -1)
    stream = np.pad(stream, [(0, 0)] * (stream.ndim - 1) + [(0, -stream.shape[-1] % 32)])
    return np.packbits(stream.astype(np.uint8), axis=-1, bitorder="little").view("<i4")


def asymmetric(weight: Array, bits: int, groups: Array) -> tuple[Array, Array, Array]:
    """Return codes [rows, columns], zeros and float16 scales [rows, num_groups] for `groups`, one a column."""
    zeros, scales = (np.zeros((len(weight), groups.max() + 1)) for _ in range(2))
    codes = np.zeros(weight.shape, dtype=np.int64)
    for group in range(groups.max() + 1):
        part = weight[:, groups == group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        scale = ((high - low) / (2**bits - 1)).astype(np.float16).astype(np.float64)
        zero = np.clip(np.round(-low / scale), 0, 2**bits - 1)
        codes[:, groups == group] = np.clip(np.round(part / scale[:, None]) + zero[:, None], 0, 2**bits - 1)
        zeros[:, group], scales[:, group] = zero, scale
    return codes, zeros.astype(np.int64), scales


def blocks_of(size: int, columns: int) -> Array:
    """Return the group of each column where groups are `size` neighbours."""
    return np.arange(columns) // size


def _read(codes: Array, zeros: Array, scales: Array, groups: Array) -> Array:
    return np.asarray((codes - zeros[:, groups]) * scales[:, groups])


def _tensor(values: Array, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.array(values)).to(dtype)


def gptq(bits: int, size: int, *, version: str = "gptq", act_order: bool = False, g_idx: bool = True) -> Scheme:
    """GPTQ; with `act_order` the groups are not neighbours."""

    def pack(weight: Array) -> tuple[Stored, Array]:
        columns = weight.shape[1]
        groups = blocks_of(columns if size == -1 else size, columns)
        if act_order:
            groups = np.random.default_rng(0).permutation(groups)
        codes, zeros, scales = asymmetric(weight, bits, groups)
        # format gptq cannot hold zero 0 but as 2^bits - 1, one less modulo 2^bits
        stored_zeros = zeros if version == "gptq_v2" else (zeros - 1) % 2**bits
        tensors = {
            "qweight": _tensor(words_of(codes, bits).T, torch.int32),
            "qzeros": _tensor(words_of(stored_zeros.T, bits), torch.int32),
            "scales": _tensor(scales.T, torch.float16),
        }
        if g_idx:
            tensors["g_idx"] = _tensor(groups, torch.int32)
        return tensors, _read(codes, zeros, scales, groups)

    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": act_order, "sym": False}
    name = f"{version}-{bits}-{size}" + "-ordered" * act_order + "-plain" * (not g_idx)
    return Scheme(name, pack, {**config, "checkpoint_format": version})


def awq(size: int) -> Scheme:
    """AWQ's GEMM layout."""

    def pack(weight: Array) -> tuple[Stored, Array]:
        groups = blocks_of(weight.shape[1] if size == -1 else size, weight.shape[1])
        codes, zeros, scales = asymmetric(weight, 4, groups)
        tensors = {
            "qweight": _tensor(_awq_words(codes.T), torch.int32),
            "qzeros": _tensor(_awq_words(zeros.T), torch.int32),
            "scales": _tensor(scales.T, torch.float16),
        }
        return tensors, _read(codes, zeros, scales, groups)

    config = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
    return Scheme(f"awq-{size}", pack, config)


def _awq_words(codes: Array) -> Array:
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), dtype=np.int64)
    for place, output in enumerate(AWQ_ORDER):
        words |= codes[:, output::8] << (4 * place)
    return words.astype(np.uint32).view(np.int32)


def compressed(kind: str, weights: dict[str, Any], pack: Callable[[Array], tuple[Stored, Array]], name: str) -> Scheme:
    """A compressed-tensors checkpoint of one group; its inputs are int8 by token where its weights are unpacked."""
    inputs = None if kind == "pack-quantized" else {"num_bits": 8, "type": weights["type"], "dynamic": True}
    config = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        "ignore": ["lm_head"],
    }
    return Scheme(name, pack, config)


def w8a8(strategy: str, *, symmetric: bool = True) -> Scheme:
    """Int8 weights with a scale for a channel, for the tensor or for groups of 16."""

    def pack(weight: Array) -> tuple[Stored, Array]:
        columns = weight.shape[1]
        rows = weight.reshape(1, -1) if strategy == "tensor" else weight
        groups = blocks_of(16 if strategy == "group" else rows.shape[1], rows.shape[1])
        if symmetric:
            limit = np.stack([np.abs(rows[:, groups == g]).max(1) for g in range(groups.max() + 1)], 1)
            scales = (limit / 127).astype(np.float16).astype(np.float64)
            zeros = np.zeros_like(scales, dtype=np.int64)
            codes = np.clip(np.round(rows / scales[:, groups]), -128, 127).astype(np.int64)
        else:
            codes, zeros, scales = asymmetric(rows, 8, groups)
            codes, zeros = codes - 128, zeros - 128
        tensors = {
            "weight": _tensor(codes.reshape(-1, columns), torch.int8),
            "weight_scale": _tensor(scales[0] if strategy == "tensor" else scales, torch.float16),
        }
        if not symmetric:
            tensors["weight_zero_point"] = _tensor(zeros[0] if strategy == "tensor" else zeros, torch.int8)
        return tensors, _read(codes, zeros, scales, groups).reshape(-1, columns)

    weights = {"num_bits": 8, "type": "int", "strategy": strategy, "symmetric": symmetric}
    if strategy == "group":
        weights["group_size"] = 16
    return compressed("int-quantized", weights, pack, f"w8a8-{strategy}" + "-zeros" * (not symmetric))


def modelslim(kind: str, *, is_float16: bool = False) -> Scheme:
    """ModelSlim's weights; of a float16 model the deq_scale of a static scheme is int64 with a float32's bits."""
    largest = 448 if "FP8" in kind else 7 if kind.startswith("W4") else 127

    def pack(weight: Array) -> tuple[Stored, Array]:
        scale = (np.abs(weight).max(1, keepdims=True) / largest).astype(np.float32)
        offset = np.full_like(scale, 3 if kind == "W8A16" else 0)
        codes = np.clip(np.round(weight / scale) + offset, -largest - 1, largest)
        parts = {"weight": _tensor(codes, torch.int8)}
        if "FP8" in kind:
            parts = {"weight": _tensor(weight / scale, torch.float32).clamp(-448, 448).to(torch.float8_e4m3fn)}
            codes = parts["weight"].float().numpy()
        elif kind.startswith("W4"):
            halves = codes.astype(np.int64) & 15
            parts = {"weight": _tensor((halves[::2] | halves[1::2] << 4).astype(np.uint8).view(np.int8), torch.int8)}
            parts["scale_bias"] = torch.ones(len(weight), 1)
        if kind not in ("W8A8", "W8A8S"):
            parts |= {"weight_scale": torch.from_numpy(scale), "weight_offset": torch.from_numpy(offset)}
        if kind in ("W8A8", "W8A8S", "W8A8_MIX"):
            deq = (scale * MODELSLIM_STEP).astype(np.float32)[:, 0]
            parts |= {
                "deq_scale": torch.from_numpy(deq.view(np.int32).astype(np.int64) if is_float16 else deq),
                "input_scale": torch.tensor([MODELSLIM_STEP]),
                "input_offset": torch.tensor([float(MODELSLIM_ZERO)]),
                "quant_bias": _tensor(-MODELSLIM_ZERO * codes.sum(1), torch.int32),
            }
            scale = (deq / MODELSLIM_STEP)[:, None] if kind != "W8A8_MIX" else scale
        return parts, (codes - offset).astype(np.float32) * scale

    config = {"version": "1.0.0", "model_quant_type": kind, "group_size": 0, "metadata": {}}
    name = f"modelslim-{kind.lower()}" + "-int64" * is_float16
    return Scheme(name, pack, {**config, "model.layers.0.mlp.down_proj.weight": kind})


def _fold_biases(tensors: Stored, biases: Stored) -> None:
    """Add these biases to the quant_bias of their layers, where those have one."""
    for name, bias in biases.items():
        layer = name.removesuffix("bias")
        if f"{layer}quant_bias" in tensors:
            deq = tensors[f"{layer}deq_scale"]
            deq = deq.int().view(torch.float32) if deq.dtype == torch.int64 else deq
            tensors[f"{layer}quant_bias"] += torch.round(bias / deq).int()


def shift_norms(folder: Path, weights: Stored) -> None:
    """Add to layer 0 of a Llama what ModelSlim's asymmetric smoothing adds: to each norm a shift b, to the layers after
    it -W b, which takes it back; `weights` are the W. Layer 1 gets a bias of zeros.
    """
    tensors, biases = load_file(folder / "model.safetensors"), dict[str, torch.Tensor]()
    for norm, after in (
        ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    ):
        shift = torch.randn(
            tensors[f"model.layers.0.{norm}.weight"].shape, generator=torch.Generator().manual_seed(len(after))
        )
        tensors[f"model.layers.0.{norm}.bias"] = shift
        biases |= {f"model.layers.0.{name}.bias": -(weights[f"model.layers.0.{name}.weight"] @ shift) for name in after}
    _fold_biases(tensors, biases)
    tensors |= biases
    tensors["model.layers.1.input_layernorm.bias"] = torch.zeros_like(shift)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def fp8(block: tuple[int, int] | None) -> Scheme:
    """Compressed-tensors' float8 weights with a bfloat16 scale for a channel or for a block."""

    def pack(weight: Array) -> tuple[Stored, Array]:
        codes, scales, read = _float8(weight, block or (1, weight.shape[1]))
        return {"weight": codes, "weight_scale": _tensor(scales, torch.bfloat16)}, read

    weights = {"num_bits": 8, "type": "float", "strategy": "block" if block else "channel", "symmetric": True}
    weights["block_structure"] = list(block) if block else None
    return compressed("float-quantized", weights, pack, "fp8-block" if block else "fp8-channel")


def hf_fp8(block: tuple[int, int] | None) -> Scheme:
    """transformers' own fp8: factors by block, or one for all."""

    def pack(weight: Array) -> tuple[Stored, Array]:
        codes, scales, read = _float8(weight, block or weight.shape)
        factor = _tensor(scales if block else scales[0, 0], torch.float32)
        return {"weight": codes, "weight_scale_inv": factor}, read

    config = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block) if block else None,
    }
    return Scheme("hf-fp8-block" if block else "hf-fp8", pack, config)


def _float8(weight: Array, block: tuple[int, ...]) -> tuple[torch.Tensor, Array, Array]:
    height, width = block
    shape = (-(-weight.shape[0] // height), -(-weight.shape[1] // width))
    scales, read = np.zeros(shape), np.zeros(weight.shape)
    codes = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(shape[0]):
        for j in range(shape[1]):
            place = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]
            scale = float(torch.tensor(np.abs(weight[place]).max() / 448).bfloat16())
            codes[place] = torch.from_numpy(weight[place] / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            scales[i, j], read[place] = scale, codes[place].to(torch.float64).numpy() * scale
    return codes, scales, read


def packed(bits: int, size: int, *, symmetric: bool = True, act_order: bool = False) -> Scheme:
    """Compressed-tensors' packed integers, with zeros where they are not symmetric."""

    def pack(weight: Array) -> tuple[Stored, Array]:
        groups = blocks_of(weight.shape[1] if size == -1 else size, weight.shape[1])
        if act_order:
            groups = np.random.default_rng(1).permutation(groups)
        codes, zeros, scales = asymmetric(weight, bits, groups)
        if symmetric:
            zeros = np.full_like(zeros, 2 ** (bits - 1))
        tensors = {
            "weight_packed": _tensor(words_of(codes, bits), torch.int32),
            "weight_scale": _tensor(scales, torch.float16),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = _tensor(words_of(zeros.T, bits).T, torch.int32)
        if act_order:
            tensors["weight_g_idx"] = _tensor(groups, torch.int32)
        return tensors, _read(codes, zeros, scales, groups)

    strategy = "channel" if size == -1 else "group"
    weights = {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": symmetric, "group_size": size}
    name = f"packed-{bits}-{size}" + "-zeros" * (not symmetric) + "-ordered" * act_order
    return compressed("pack-quantized", weights, pack, name)


SCHEMES = (
    *(gptq(bits, 32) for bits in (2, 3, 4, 8)),
    gptq(4, 16, version="gptq_v2", act_order=True),
    gptq(4, -1),
    gptq(4, 32, g_idx=False),
    gptq(3, 32, version="gptq_v2", act_order=True),
    awq(16),
    awq(-1),
    *(w8a8(strategy) for strategy in ("channel", "tensor", "group")),
    w8a8("channel", symmetric=False),
    w8a8("tensor", symmetric=False),
    *(modelslim(kind) for kind in ("W8A8", "W8A8S", "W8A8_MIX", "W8A8_DYNAMIC", "W4A8_DYNAMIC", "W8A16")),
    modelslim("WFP8AFP8_DYNAMIC"),
    modelslim("W8A8", is_float16=True),
    fp8(None),
    fp8((24, 40)),
    hf_fp8(None),
    hf_fp8((24, 40)),
    packed(4, 16),
    packed(4, 16, symmetric=False),
    packed(8, -1, symmetric=False),
    packed(4, 32, act_order=True),
)
