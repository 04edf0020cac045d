"""Reading checkpoints part by part: equal to safetensors' own reader, and not a byte more than the part has."""

import math
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.checkpoints.stored_weights import StoredWeights
from engine.checkpoints.weights import TensorSlice
from wire.errors import ConfigError

_TENSORS = {
    "vector": torch.arange(7, dtype=torch.float32),
    "matrix": torch.randn(9, 10, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
    "experts": torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(1)).to(torch.float16),
    "packed": torch.randint(-100, 100, (4, 6), generator=torch.Generator().manual_seed(2), dtype=torch.int32),
    "scalar": torch.tensor(2.5),
    "none": torch.zeros(0, 4),
    "bytes": torch.arange(12, dtype=torch.uint8).view(3, 4),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights")
    save_file(_TENSORS, path / "model.safetensors")
    return path


def test_whole_tensors_are_those_of_safetensors(folder: Path) -> None:
    expected = load_file(folder / "model.safetensors")

    with StoredWeights(folder) as weights:
        assert sorted(expected) == list(weights.names)
        for name, tensor in expected.items():
            assert weights.shape(name) == tuple(tensor.shape)
            assert weights.dtype(name) == tensor.dtype
            assert torch.equal(weights.read(name), tensor)


@given(data=st.data())
def test_a_part_is_the_slice_and_costs_its_bytes_alone(folder: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["vector", "matrix", "experts", "packed", "bytes"]))
    tensor = _TENSORS[name]
    dim = data.draw(st.integers(0, tensor.dim() - 1))
    start = data.draw(st.integers(0, tensor.shape[dim]))
    end = data.draw(st.integers(start, tensor.shape[dim]))

    with StoredWeights(folder) as weights:
        part = weights.read(name, TensorSlice(dim, start, end))

    assert torch.equal(part, tensor.narrow(dim, start, end - start))
    assert weights.bytes_read == math.prod(part.shape) * tensor.dtype.itemsize


def test_the_kernel_counts_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    save_file({"wide": torch.randn(512, 2048)}, tmp_path / "model.safetensors")
    weights = StoredWeights(tmp_path)
    before = _read_by_this_process()

    weights.read("wide", TensorSlice(1, 100, 612))

    read = _read_by_this_process() - before
    weights.close()
    assert 512 * 512 * 4 <= read <= 512 * 512 * 4 * 1.02


@pytest.mark.parametrize(
    "part", [TensorSlice(2, 0, 1), TensorSlice(0, 0, 10), TensorSlice(0, 3, 2), TensorSlice(-1, 0, 1)]
)
def test_a_part_that_is_not_there_is_a_defect(folder: Path, part: TensorSlice) -> None:
    with StoredWeights(folder) as weights, pytest.raises(ValueError, match=r"matrix has shape \(9, 10\)"):
        weights.read("matrix", part)


def test_a_file_truncated_after_its_header_was_read_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"wide": torch.randn(64, 64)}, file)
    with StoredWeights(tmp_path) as weights:
        os.truncate(file, file.stat().st_size - 100)

        with pytest.raises(ConfigError, match=r"model\.safetensors ends inside tensor wide"):
            weights.read("wide")


def _read_by_this_process() -> int:
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))
