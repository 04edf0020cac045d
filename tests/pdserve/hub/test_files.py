"""Which files of a repository are fetched."""

import pytest

from pdserve.hub.files import small_files, weight_file
from wire.errors import ConfigError


@pytest.mark.parametrize(
    "name",
    [
        "config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
        "chat_template.jinja", "merges.txt", "vocab.txt", "vocab.json", "tokenizer.model", "quantize_config.json",
        "quant_model_description.json", "1_Pooling/config.json",
    ],
)  # fmt: skip
def test_small_files_that_a_server_reads_are_fetched(name: str) -> None:
    assert small_files([name]) == [name]


@pytest.mark.parametrize(
    "name",
    [
        "modeling.py", "config.json.py", "../config.json", "/etc/config.json", "../1_Pooling/config.json", ".json",
        "a/config.json", "original/params.json", "1_Pooling/../../config.json", "README.md", "model.safetensors",
        "tf_model.h5.index.json", "pytorch_model.bin.index.json", "x.pkl", "é.json", "config.json\n",
    ],
)  # fmt: skip
def test_all_other_files_are_not_fetched(name: str) -> None:
    assert small_files([name]) == []


def test_config_json_comes_last() -> None:
    assert small_files(["config.json", "a.json", "vocab.txt"]) == ["a.json", "vocab.txt", "config.json"]


@pytest.mark.parametrize(
    ("names", "taken"),
    [
        (["pytorch_model.bin", "model.safetensors.index.json", "model.safetensors"], "model.safetensors"),
        (["pytorch_model.bin", "model.safetensors.index.json"], "model.safetensors.index.json"),
        (["pytorch_model.bin.index.json", "pytorch_model.bin"], "pytorch_model.bin"),
        (["pytorch_model.bin.index.json"], "pytorch_model.bin.index.json"),
        (["quant_model_weight_w8a8.safetensors", "config.json"], "quant_model_weight_w8a8.safetensors"),
        (
            [
                "quant_model_weights-00001-of-00002.safetensors",
                "quant_model_weights-00002-of-00002.safetensors",
                "quant_model_weights.safetensors.index.json",
            ],
            "quant_model_weights.safetensors.index.json",
        ),
    ],
)
def test_safetensors_are_preferred_to_bin(names: list[str], taken: str) -> None:
    assert weight_file("a/b", names) == taken


def test_other_weights_are_named() -> None:
    with pytest.raises(
        ConfigError, match=r"a/b has neither .* nor an index of several; it has only consolidated\.00\.pth$"
    ):
        weight_file("a/b", ["config.json", "consolidated.00.pth"])
