"""A checkpoint's declared quantisation, against the flag: what is read, and each refusal with its message."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.quantization.detect import find_quantization
from tests.engine.tiny_quantised import SCHEMES, awq, fp8, gptq, hf_fp8, modelslim, packed, w8a8
from wire.errors import ConfigError


def _folder(path: Path, config: dict[str, Any] | None, *, key: str = "quantization_config") -> Path:
    content = {"model_type": "llama"} if config is None else {"model_type": "llama", key: config}
    (path / "config.json").write_text(json.dumps(content))
    return path


def _group(**changes: Any) -> dict[str, Any]:
    """Return w8a8's config with other values of its group's weights."""
    config = w8a8("channel").config
    group = config["config_groups"]["group_0"]
    return {**config, "config_groups": {"group_0": {**group, "weights": {**group["weights"], **changes}}}}


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_the_method_is_found_in_the_config(scheme: Any, tmp_path: Path) -> None:
    layout = find_quantization(_folder(tmp_path, scheme.config), None)

    assert layout == find_quantization(tmp_path, scheme.method)
    assert layout is not None
    assert scheme.method.partition("-")[0] in layout.name.lower()
    rounding = ("w8a8", "fp8", "hf-fp8", "modelslim-w8a8", "modelslim-w4a8", "modelslim-wfp8")
    assert layout.rounds_inputs == scheme.name.startswith(rounding)


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        (awq(16), "AWQ 4-bit"),
        (gptq(3, 32), "GPTQ 3-bit"),
        (w8a8("channel"), "compressed-tensors int8"),
        (fp8(None), "compressed-tensors float8"),
        (packed(4, 16), "compressed-tensors int4"),
        (hf_fp8(None), "fp8"),
        (modelslim("W8A8_DYNAMIC"), "ModelSlim W8A8_DYNAMIC"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_layout_is_named_with_its_width(scheme: Any, words: str, tmp_path: Path) -> None:
    layout = find_quantization(_folder(tmp_path, scheme.config), None)

    assert layout is not None
    assert layout.name == words


def test_plain_weights_have_none(tmp_path: Path) -> None:
    assert find_quantization(_folder(tmp_path, None), None) is None
    assert find_quantization(_folder(tmp_path, None, key="quantization_config"), None) is None


def test_ascend_is_modelslim_as_in_vllm_ascend(tmp_path: Path) -> None:
    layout = find_quantization(_folder(tmp_path, modelslim("W8A8").config), "ascend")

    assert layout == find_quantization(tmp_path, "modelslim")


def test_smoothquant_is_compressed_tensors_in_int8(tmp_path: Path) -> None:
    layout = find_quantization(_folder(tmp_path, w8a8("channel").config), "smoothquant")

    assert layout == find_quantization(tmp_path, "compressed-tensors")


def test_older_places_of_the_config_are_read(tmp_path: Path) -> None:
    gptq_file, awq_file = ({"bits": 8, "group_size": 64, "desc_act": True}, {"w_bit": 4, "q_group_size": 64})
    places = {
        "key": (_folder, "compression_config", w8a8("tensor").config, "compressed-tensors int8"),
        "nested": (_folder, "text_config", {"quantization_config": awq(16).config}, "AWQ 4-bit"),
    }
    for name, (make, key, config, words) in places.items():
        (tmp_path / name).mkdir()
        found = find_quantization(make(tmp_path / name, config, key=key), None)
        assert found is not None
        assert found.name == words
    for name, content, words in (("quantize_config", gptq_file, "GPTQ 8-bit"), ("quant_config", awq_file, "AWQ 4-bit")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / f"{name}.json").write_text(json.dumps(content))
        found = find_quantization(_folder(folder, None), None)
        assert found is not None
        assert found.name == words


@pytest.mark.parametrize(
    ("config", "asked", "words"),
    [
        (None, "awq", r"--quantization awq, but .* is not quantised"),
        (awq(16).config, "gptq", r"--quantization gptq, but .*config\.json says awq"),
        (gptq(4, 32).config, "awq", r"--quantization awq, but .*config\.json says gptq"),
        (awq(16).config, "smoothquant", r"--quantization smoothquant, but .* says awq"),
        (w8a8("channel").config, "gguf", r"--quantization gguf, but .* says compressed-tensors"),
        (fp8(None).config, "smoothquant", r"smoothquant means int8 .*but .* says float-quantized with float8 weights"),
        (packed(4, 16).config, "smoothquant", r"says pack-quantized with int4 weights and unquantised inputs"),
        (packed(8, 16).config, "smoothquant", r"smoothquant means int8 weights and inputs"),
        (modelslim("W8A8").config, "smoothquant", r"--quantization smoothquant, but .*config\.json says modelslim"),
        (awq(16).config, "ascend", r"--quantization ascend, but .*config\.json says awq"),
        (
            {**w8a8("channel").config, "config_groups": {"group_0": {"weights": "int8"}}},
            "smoothquant",
            r"smoothquant means int8 .*with unquantised weights and unquantised inputs",
        ),
    ],
)
def test_a_flag_that_contradicts_the_checkpoint_names_both(
    config: dict[str, Any] | None, asked: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        find_quantization(_folder(tmp_path, config), asked)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**awq(16).config, "version": "gemv"}, "AWQ's gemv layout .*only autoawq's gemm"),
        ({**awq(16).config, "version": "gemv_fast"}, "AWQ's gemv_fast layout"),
        ({**awq(16).config, "version": "marlin"}, "AWQ's marlin layout"),
        ({**awq(16).config, "version": "exllama"}, "AWQ's exllama layout"),
        ({**awq(16).config, "backend": "llm-awq"}, "AWQ's gemm layout of llm-awq"),
        ({**awq(16).config, "bits": 8}, "AWQ with 8 bits is not supported: only 4"),
        ({**awq(16).config, "zero_point": False}, "AWQ without zero points"),
        ({**awq(16).config, "group_size": 0}, "group size 0 must be positive, or -1"),
        ({**awq(16).config, "group_size": "x"}, "group_size is 'x', not a whole number"),
        ({**gptq(4, 32).config, "checkpoint_format": "marlin"}, "GPTQ's marlin format .*only gptq, gptq_v2"),
        ({**gptq(4, 32).config, "checkpoint_format": "bitblas"}, "GPTQ's bitblas format"),
        ({**gptq(4, 32).config, "is_marlin_format": True}, "GPTQ's marlin format"),
        ({**gptq(4, 32).config, "bits": 5}, "GPTQ with 5 bits is not supported: only 2, 3, 4, 8"),
        ({**gptq(4, 32).config, "pack_dtype": "int8"}, "GPTQ packed in int8"),
        ({**gptq(4, 32).config, "dynamic": {"+:.*": {"group_size": 16}}}, "other group sizes for some modules"),
        ({**w8a8("channel").config, "format": "marlin-24"}, "compressed-tensors format marlin-24 .*only int-quantized"),
        ({**w8a8("channel").config, "format": "nvfp4-pack-quantized"}, "format nvfp4-pack-quantized"),
        ({**w8a8("channel").config, "quantization_status": "frozen"}, "its weights are frozen, not compressed"),
        ({**w8a8("channel").config, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights .sparse-24"),
        ({**w8a8("channel").config, "transform_config": {"config_groups": {"u": {}}}}, "transforms of weights"),
        ({**w8a8("channel").config, "config_groups": {}}, "config_groups of compressed-tensors are missing"),
        ({**w8a8("channel").config, "config_groups": {"g": {"weights": None}}}, "without quantised weights"),
        (_group(num_bits=4), "int-quantized with 4-bit int is not supported: only 8-bit"),
        (_group(type="float"), "int-quantized with 8-bit float"),
        (_group(strategy="block", block_structure="128x128"), "block size 128x128 must be two positive"),
        (
            {**packed(4, 16).config, **_group(num_bits=3), "format": "pack-quantized"},
            "3-bit int .*only int with 4 or 8 bits",
        ),
        ({**hf_fp8(None).config, "fmt": "e5m2"}, "fp8 of format e5m2 is not supported: only e4m3"),
        ({**hf_fp8(None).config, "weight_block_size": [128]}, r"block size \[128\] must be two positive"),
        ({"quant_method": "bitsandbytes"}, "quantised by bitsandbytes, which is not supported; supported: awq, gptq"),
        ({"bits": 4}, "no quant_method"),
        ([4], "must be an object, not list"),
    ],
)
def test_a_layout_that_is_not_supported_is_refused_by_name(config: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        find_quantization(_folder(tmp_path, config), None)


def test_other_widths_of_single_modules_are_taken_from_their_tensors(tmp_path: Path) -> None:
    config = {**gptq(4, 32).config, "dynamic": {"-:.*lm_head.*": {}, "+:.*down.*": {"bits": 8}}}

    layout = find_quantization(_folder(tmp_path, config), None)

    assert layout is not None
    assert layout.name == "GPTQ mixed-bit"


_UP = "model.layers.3.mlp.up_proj"
_KEY = "model.layers.3.self_attn.k_proj"


@pytest.mark.parametrize("file", ["quant_model_description.json", "quant_model_description_w8a8.json"])
def test_modelslims_description_precedes_the_config(file: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text(json.dumps(modelslim("W8A8_MIX").config))

    layout = find_quantization(_folder(tmp_path, awq(16).config), "modelslim")

    assert layout is not None
    assert layout.name == "ModelSlim W8A8_MIX"


@pytest.mark.parametrize(
    ("described", "words"),
    [
        ({f"{_UP}.weight": "W4A8_MXFP"}, rf"{_UP} is W4A8_MXFP, .* \(only Ascend 950 multiplies its blocks\)"),
        ({f"{_UP}.weight": "W4A4_MXFP4"}, f"{_UP} is W4A4_MXFP4"),
        ({f"{_UP}.weight": "W4A4_MXFP4_FLATQUANT"}, rf"{_UP} is W4A4_MXFP4_FLATQUANT, .* \(inputs are transformed"),
        ({f"{_UP}.weight": "W4A4_FLATQUANT_DYNAMIC"}, rf"{_UP} is .*FLATQUANT_DYNAMIC, .* \(inputs are transformed"),
        ({f"{_UP}.weight": "W4A4_DYNAMIC"}, rf"{_UP} is W4A4_DYNAMIC, .* \(inputs have 4 bits\)"),
        ({f"{_UP}.weight": "W8A8_MXFP8"}, f"{_UP} is W8A8_MXFP8"),
        ({f"{_UP}.weight": "W4A16"}, f"{_UP} is W4A16"),
        ({f"{_UP}.weight": "W8A8SC"}, rf"{_UP} is W8A8SC, .* \(weights are compressed\)"),
        ({f"{_UP}.weight_scale_second": "W4A8_DYNAMIC"}, rf"{_UP} is W4A8_DYNAMIC with .* \(it has scales of two"),
        ({f"{_KEY}.kv_cache_scale": "C8", "kv_cache_type": "C8"}, rf"{_KEY} is C8, .* \(the KV cache has the dtype"),
        ({f"{_KEY}.kv_cache_offset": "W8A8", "kv_cache_type": "C8"}, f"{_KEY} is C8"),
        ({"model.layers.3.self_attn.fa_k.scale": "FAQuant"}, "model.layers.3.self_attn.fa_k is FAQuant"),
        ({"model.layers.3.self_attn.quant_type": "FP8_DYNAMIC"}, "model.layers.3.self_attn is FP8_DYNAMIC"),
        ({f"{_UP}.div.mul_scale": "FLOAT"}, rf"{_UP}.div is FLOAT with mul_scale, .* \(inputs are smoothed"),
        ({f"{_UP}.weight": 8}, f"{_UP} is 8"),
        ({"fa_quant_type": "FAKQuant"}, "fa_quant_type is FAKQuant"),
        ({"reduce_quant_type": "per_channel"}, "reduce_quant_type is per_channel"),
        ({"metadata": {"quarot": {"heads": 8}}}, r"metadata.quarot is set, .* \(inputs are rotated at run time\)"),
    ],
)
def test_a_modelslim_scheme_that_is_not_supported_is_named(described: Any, words: str, tmp_path: Path) -> None:
    content = {**modelslim("W8A8").config, **described}
    (tmp_path / "quant_model_description.json").write_text(json.dumps(content))
    known = (
        "supported ModelSlim schemes: "
        "FLOAT, W8A8, W8A8S, W8A8_MIX, W8A8_DYNAMIC, W4A8_DYNAMIC, W8A16, W8A8FP8_DYNAMIC, "
        r"WFP8AFP8_DYNAMIC$"
    )

    with pytest.raises(ConfigError, match=f"json: .*{words}.*; {known}"):
        find_quantization(_folder(tmp_path, None), None)


def test_several_modelslim_descriptions_are_refused(tmp_path: Path) -> None:
    for name in ("quant_model_description.json", "quant_model_description_w8a8.json"):
        (tmp_path / name).write_text("{}")

    with pytest.raises(ConfigError, match=r"several .*: quant_model_description\.json, quant_model_description_w8a8"):
        find_quantization(_folder(tmp_path, None), None)
