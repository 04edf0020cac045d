"""pytorch_model.bin: what is converted, and what is refused with a message, without executing any of it."""

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.checkpoints.bin_conversion import convert_bin
from engine.checkpoints.bin_files import BIN_INDEX, BIN_NAME, find_bin_files
from engine.checkpoints.model_identity import weight_files
from tests.engine.bin_models import Marking, save_bin
from wire.errors import ConfigError

EMBEDDINGS = "model.embed_tokens.weight"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def convert(source: Path, state: Any, *, tied: bool = False, shards: int = 1) -> dict[str, torch.Tensor]:
    """Return the contents of the safetensors files that are made of `state`."""
    save_bin(source, state, shards=shards)
    bins = find_bin_files(source)
    assert bins is not None
    target = source.parent / "target"
    target.mkdir()
    convert_bin(bins, target, tied=tied)
    return {name: tensor for file in weight_files(target) for name, tensor in load_file(file).items()}


def rows(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


@pytest.mark.parametrize("shards", [1, 3])
def test_tensors_keep_names_dtypes_and_values(source: Path, shards: int) -> None:
    state = {f"layer.{dtype}": rows(4, 3).to(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)}

    made = convert(source, state, shards=shards)

    assert made.keys() == state.keys()
    assert all(torch.equal(made[name], tensor) and made[name].dtype == tensor.dtype for name, tensor in state.items())
    assert len(list((source.parent / "target").glob("*.safetensors"))) == shards


def test_views_transposes_and_shared_storage_become_own_tensors(source: Path) -> None:
    whole = rows(6, 4)
    state = {"part": whole[2:4], "turned": whole.t(), "one": whole, "same": whole, "scalar": torch.tensor(2.5)}

    made = convert(source, state)

    assert all(torch.equal(made[name], tensor) for name, tensor in state.items())


def test_parameters_are_tensors(source: Path) -> None:
    made = convert(source, {"w": torch.nn.Parameter(rows(2, 2))})

    assert torch.equal(made["w"], rows(2, 2))


@pytest.mark.parametrize(
    ("tied", "head", "kept"),
    [(True, rows(5, 2), False), (True, rows(5, 2) + 1, True), (False, rows(5, 2), True)],
    ids=["tied", "tied by config alone", "equal by chance"],
)
def test_a_tied_output_head_is_left_out(source: Path, tied: bool, head: torch.Tensor, kept: bool) -> None:
    made = convert(source, {EMBEDDINGS: rows(5, 2), "lm_head.weight": head}, tied=tied)

    assert ("lm_head.weight" in made) is kept


def test_a_file_that_would_run_code_is_refused_and_runs_none(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "marker"
    state = {"w": rows(2, 2), "extra": Marking(marker)}
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")

    with pytest.raises(ConfigError, match=rf"{BIN_NAME} names .*which is not a tensor: .*no code was run"):
        convert(source, state)

    assert not marker.exists()
    torch.load(source / BIN_NAME, weights_only=False)
    assert marker.exists(), "without care it would have run"


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"state_dict": {"w": rows(2, 2)}}, "'state_dict' is of type dict, but must be a tensor"),
        ({"w": rows(2, 2), "epoch": 3}, "'epoch' is of type int, but must be a tensor"),
        ({0: rows(2, 2)}, "the tensor name 0 is of type int, but must be text"),
        ({"w": rows(2, 2).to_sparse()}, r"'w' is torch\.sparse_coo on cpu, but must be a dense"),
        ([rows(2, 2)], "must contain named tensors, but contains a value of type list"),
        ({}, "must contain named tensors, but contains none"),
    ],
    ids=["nested", "number", "name", "sparse", "list", "empty"],
)
def test_anything_but_named_plain_tensors_is_refused(source: Path, state: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        convert(source, state)


def pickled(file: Path) -> None:
    file.write_bytes(pickle.dumps({"w": 1}))


def old_format(file: Path) -> None:
    torch.save({"w": rows(2, 2)}, file, _use_new_zipfile_serialization=False)


def cut_short(file: Path) -> None:
    torch.save({"w": rows(200, 200)}, file)
    file.write_bytes(file.read_bytes()[:-5000])


def packed(file: Path) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model/data.pkl", b"\0" * 1_000_000)


def without_pickle(file: Path) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("model/data/0", b"1234")


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (pickled, "was not written by torch.save"),
        (old_format, "was not written by torch.save of torch 1.6 or later"),
        (cut_short, "was not written by torch.save"),
        (packed, "model/data.pkl in it is compressed"),
        (without_pickle, r"must have one pickle of at most \d+ bytes, but has none"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_other_files_of_that_name_are_refused(source: Path, write: Any, words: str) -> None:
    write(source / BIN_NAME)
    bins = find_bin_files(source)
    assert bins is not None

    with pytest.raises(ConfigError, match=words):
        convert_bin(bins, source.parent, tied=False)


def test_an_archive_larger_than_declared_is_refused(source: Path) -> None:
    torch.save({"w": rows(20, 20)}, source / BIN_NAME)
    raw = bytearray((source / BIN_NAME).read_bytes())
    entry = raw.index(b"PK\x01\x02")  # the first of the central directory: 4 bytes of size at 24
    raw[entry + 20 : entry + 28] = (2**30).to_bytes(4, "little") * 2
    (source / BIN_NAME).write_bytes(raw)
    bins = find_bin_files(source)
    assert bins is not None

    with pytest.raises(ConfigError, match="its entries claim more than its"):
        convert_bin(bins, source.parent, tied=False)


@pytest.mark.covers("A11.9")
@pytest.mark.parametrize("name", ["model.pt", "consolidated.00.pth", "training_args.bin", "weights.pkl"])
def test_pickles_of_other_names_are_refused(source: Path, name: str) -> None:
    pickled(source / name)

    with pytest.raises(ConfigError, match=rf"has no safetensors, only {name}: of pickles, only {BIN_NAME}"):
        find_bin_files(source)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_folder_with_safetensors_needs_no_pickle(source: Path, name: str) -> None:
    (source / name).touch()
    pickled(source / BIN_NAME)

    assert find_bin_files(source) is None


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"w": "../pytorch_model.bin"}, r"names '\.\./pytorch_model\.bin', which is not a \.bin file of the folder"),
        ({"w": "code.py"}, r"names 'code\.py', which is not a \.bin file"),
        ({"w": "gone.bin"}, r"lists missing files: gone\.bin"),
        ({"w": 1}, "its weight_map must map tensor names"),
        ({}, "its weight_map must map tensor names"),
    ],
)
def test_a_broken_index_is_refused(source: Path, weight_map: dict[str, Any], words: str) -> None:
    (source / BIN_INDEX).write_text(json.dumps({"weight_map": weight_map}))

    with pytest.raises(ConfigError, match=words):
        find_bin_files(source)


def test_the_index_and_the_files_must_agree(source: Path) -> None:
    save_bin(source, {"a": rows(1, 1), "b": rows(1, 1)}, shards=2)
    index = json.loads((source / BIN_INDEX).read_text())
    index["weight_map"]["c"] = "pytorch_model-00002-of-00002.bin"
    (source / BIN_INDEX).write_text(json.dumps(index))
    bins = find_bin_files(source)
    assert bins is not None

    with pytest.raises(ConfigError, match=r"00002-of-00002\.bin has no tensor c, which the index lists for it"):
        convert_bin(bins, source.parent, tied=False)
