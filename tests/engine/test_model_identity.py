"""The identity depends on what is computed with, and on nothing else in a folder."""

import json
import shutil
import struct
import time
from pathlib import Path

import pytest

from engine.checkpoints.model_identity import identify, name_of, stored_tensors, weight_files
from wire.errors import ConfigError

_Tensors = dict[str, bytes]
_TENSORS: _Tensors = {"a.weight": bytes(range(200)) * 1000, "b.weight": b"\x01\x02" * 50}


def _write_safetensors(file: Path, tensors: _Tensors) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt", "written": str(time.monotonic_ns())}}
    offset = 0
    for name, data in tensors.items():
        header[name] = {"dtype": "F16", "shape": [len(data) // 2], "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    raw = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + b"".join(tensors.values()))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama", "hidden_size": 8}')
    (folder / "tokenizer.json").write_text('{"model": {}}')
    _write_safetensors(folder / "model.safetensors", _TENSORS)
    return folder


def test_a_copy_elsewhere_has_the_same_identity(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")

    assert identify(copy, "m") == identify(model, "m")
    assert len(identify(model, "m").weights_digest) == 16


def test_volatile_config_keys_and_key_order_do_not_matter(model: Path) -> None:
    before = identify(model, "m")

    (model / "config.json").write_text(
        '{"hidden_size": 8, "model_type": "llama", "transformers_version": "9", "_name_or_path": "x", "dtype": "f"}'
    )

    assert identify(model, "m") == before


@pytest.mark.parametrize("stem", ["model", "quant_model_weights", "quant_model_weight_w8a8"])
def test_how_weights_are_split_into_files_does_not_matter(model: Path, stem: str) -> None:
    before = identify(model, "m")

    (model / "model.safetensors").unlink()
    for number, (name, data) in enumerate(_TENSORS.items()):
        _write_safetensors(model / f"{stem}-{number}.safetensors", {name: data})
    weight_map = {name: f"{stem}-{number}.safetensors" for number, name in enumerate(_TENSORS)}
    (model / f"{stem}.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    assert identify(model, "m") == before


@pytest.mark.parametrize("name", ["quant_model_weights.safetensors", "quant_model_weight_w8a8.safetensors"])
def test_modelslims_weights_precede_the_plain_ones(model: Path, name: str) -> None:
    _write_safetensors(model / name, _TENSORS)

    assert weight_files(model) == [model / name]


@pytest.mark.parametrize("place", [0, 65535])
def test_a_changed_weight_changes_it(model: Path, place: int) -> None:
    before = identify(model, "m")

    changed = bytearray(_TENSORS["a.weight"])
    changed[place] ^= 1
    _write_safetensors(model / "model.safetensors", {**_TENSORS, "a.weight": bytes(changed)})

    after = identify(model, "m")
    assert after.weights_digest != before.weights_digest
    assert after.tokenizer_digest == before.tokenizer_digest


def test_a_changed_name_or_config_changes_it(model: Path) -> None:
    digests = {identify(model, "m").weights_digest}

    _write_safetensors(model / "model.safetensors", {"c": _TENSORS["a.weight"], "b.weight": _TENSORS["b.weight"]})
    digests.add(identify(model, "m").weights_digest)
    (model / "config.json").write_text('{"model_type": "llama", "hidden_size": 9}')
    digests.add(identify(model, "m").weights_digest)

    assert len(digests) == 3


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_changed_tokenizer_file_changes_it(model: Path, name: str) -> None:
    before = identify(model, "m")

    (model / name).write_text("{}")

    after = identify(model, "m")
    assert after.tokenizer_digest != before.tokenizer_digest
    assert after.weights_digest == before.weights_digest


def test_tensors_are_found_in_their_files(model: Path) -> None:
    tensor = stored_tensors(model)[1]

    data = tensor.file.read_bytes()[tensor.offset : tensor.offset + tensor.length]
    assert (tensor.name, tensor.dtype, tensor.shape) == ("b.weight", "F16", (50,))
    assert data == _TENSORS["b.weight"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        struct.pack("<Q", 1 << 60) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2) + b"{!",
        struct.pack("<Q", 12) + b'{"a": "odd"}',
    ],
)
def test_a_broken_file_is_refused_by_name(model: Path, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)

    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        identify(model, "m")


def test_a_truncated_file_is_refused(model: Path) -> None:
    whole = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[:-1])

    with pytest.raises(ConfigError, match=r"tensor b\.weight ends at byte 200100 of its data, which has 200099 bytes"):
        identify(model, "m")


def test_a_missing_part_is_refused(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')

    with pytest.raises(ConfigError, match=r"names missing files: gone\.safetensors"):
        weight_files(model)


def test_other_formats_are_refused_with_advice(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")

    with pytest.raises(ConfigError, match=r"only pytorch_model\.bin: convert it to safetensors first"):
        identify(model, "m")


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("Qwen3-0.6B", "Qwen3-0.6B"),
        ("models--facebook--opt-125m/snapshots/27dcfa7", "facebook/opt-125m"),
        ("models--gpt2/snapshots/607a30d", "gpt2"),
        ("snapshots/607a30d", "607a30d"),
    ],
)
def test_a_model_in_a_hubs_cache_has_its_hub_name(folder: str, name: str, tmp_path: Path) -> None:
    (tmp_path / folder).mkdir(parents=True)

    assert name_of(tmp_path / folder) == name
