"""Packed weights in a memfd: the first process fills it, later ones map it; one that dies before leaves it empty."""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.attention.registered import register
from engine.fused import area
from engine.fused.area import HUGE, NAME, SharedWeights, shared_weights
from engine.fused.fuse import fuse
from engine.model_folder import open_folder, read_network
from tests.engine.tiny_models import make_tiny_model
from tests.native.built import built_engine

_KEY, _BYTES = b"k" * 32, HUGE + 5000
_DIED = "left by one that died"


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(area, "_can_collapse", lambda: True)  # older kernels lose speed alone
    monkeypatch.setattr(area, "_NODES", Path("/nowhere"))
    descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    yield descriptor
    os.close(descriptor)


def _fill(descriptor: int, text: bytes) -> None:
    made = SharedWeights(descriptor, _KEY).area(_BYTES)
    assert made is not None
    assert not made.is_filled
    ctypes.memmove(made.start, text, len(text))
    made.publish()
    made.release()


def test_published_weights_are_mapped_read_only_by_others(memory: int) -> None:
    _fill(memory, b"packed")

    found = SharedWeights(memory, _KEY).area(_BYTES)

    assert found is not None
    assert found.is_filled
    assert found.start % HUGE == 0
    assert ctypes.string_at(found.start, 6) == b"packed"
    with pytest.raises(PermissionError):
        os.pwrite(memory, b"x", 0)


@pytest.mark.parametrize(("key", "num_bytes"), [(b"o" * 32, _BYTES), (_KEY, _BYTES + HUGE)])
def test_other_weights_get_no_shared_memory(memory: int, key: bytes, num_bytes: int) -> None:
    _fill(memory, b"packed")

    assert SharedWeights(memory, key).area(num_bytes) is None


def test_unpublished_weights_are_packed_again(memory: int) -> None:
    first = SharedWeights(memory, _KEY).area(_BYTES)
    assert first is not None
    ctypes.memmove(first.start, _DIED.encode(), len(_DIED))
    first.release()

    again = SharedWeights(memory, _KEY).area(_BYTES)

    assert again is not None
    assert not again.is_filled
    assert ctypes.string_at(again.start, len(_DIED)) == bytes(len(_DIED))


def test_without_huge_pages_or_on_several_nodes_none_is_shared(
    memory: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(area, "_can_collapse", lambda: False)
    assert SharedWeights(memory, _KEY).area(_BYTES) is None
    monkeypatch.setattr(area, "_can_collapse", lambda: True)
    for node in ("node0", "node1"):
        (tmp_path / node).mkdir()
    monkeypatch.setattr(area, "_NODES", tmp_path)

    assert SharedWeights(memory, _KEY).area(_BYTES) is None


def test_only_the_memfd_of_up_is_taken_and_files_make_the_key(memory: int, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"1")
    with (tmp_path / "other").open("wb") as other:
        for text in ("", "x", "999999", str(other.fileno())):
            assert shared_weights(tmp_path, "bfloat16", text=text) is None
    keys = [_key(tmp_path, "bfloat16", memory), _key(tmp_path, "float32", memory)]
    (tmp_path / "model.safetensors").write_bytes(b"22")
    keys.append(_key(tmp_path, "bfloat16", memory))

    assert len(set(keys)) == 3


def _key(folder: Path, dtype: str, descriptor: int) -> bytes:
    found = shared_weights(folder, dtype, text=str(descriptor))
    assert found is not None
    return found._key


def test_a_second_load_packs_nothing_and_computes_the_same(memory: int, tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path / "llama")
    register()
    with built_engine().threads(1) as threads:
        if threads.isa == "plain":
            pytest.skip("this CPU has none of the instruction sets that are used")
        packed = []
        for _ in range(2):
            network = read_network(open_folder(model), "float32").loaded.network
            weights = fuse(network, threads=threads, shared=shared_weights(model, threads.isa, text=str(memory)))
            assert weights is not None
            found, size = weights.memory.area, weights.memory._end - weights.memory.area.start
            packed.append((found.is_filled, ctypes.string_at(found.start, size)))

    assert [is_filled for is_filled, _ in packed] == [False, True]
    assert packed[0][1] == packed[1][1]
    assert torch.frombuffer(bytearray(packed[0][1]), dtype=torch.float32).abs().sum() > 0
