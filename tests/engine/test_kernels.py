"""A load without built kernels: it does not wait for them, reports so, and chooses the dtype of later loads."""

import ctypes
import os
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.attention.cpu import CpuAttention
from engine.checkpoints.dtypes import read_cpu_flags
from engine.fused import structs
from engine.fused.kernels import find_kernels
from engine.loader import LoadedModel, load_model
from engine.ranks.rank_part import load_part
from engine.ranks.reduce import Reduce
from engine.ranks.setup import RankSetup
from native import attention
from native.cache import building, library_folder
from native.engine_library import build_engine
from processes.rank_payloads import from_json, to_json
from tests.engine.tiny_models import make_tiny_model
from tests.native.built import built_engine
from tests.native.test_move_library import script

_WAIT_S = 300.0

pytestmark = pytest.mark.skipif(read_cpu_flags() < {"avx2", "fma"}, reason="missing instructions: AVX2")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of a family that the kernels know, in bfloat16."""
    path = make_tiny_model("llama", tmp_path_factory.mktemp("llama"))
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture
def held_cc(native_libraries: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a compiler that makes good kernels once there is a line to read here."""
    made = build_engine().path
    os.mkfifo(tmp_path / "go")
    step = f'case "$*" in *" -shared "*) read line <"{tmp_path}/go";; esac'
    compiler = script(tmp_path, "held-cc", f'{step}; while [ "$1" != -o ]; do shift; done; cp "{made}" "$2"')
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("PDSERVE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("PDSERVE_NATIVE", raising=False)
    return tmp_path / "go"


@pytest.mark.parametrize(("mirror", "name"), [(structs, "DecoderStruct"), (attention, "AttentionLayer")])
def test_structs_of_other_sizes_leave_work_to_torch(
    mirror: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built_engine()
    wider = type(name, (getattr(mirror, name),), {"_fields_": (("more", ctypes.c_int64),)})
    monkeypatch.setattr(mirror, name, wider)

    kernels = find_kernels(1)

    assert kernels.threads is None
    assert f"struct {name} is " in kernels.note


def test_ranks_follow_what_rank_0_found(llama: Path) -> None:
    setup = RankSetup(str(llama), "bfloat16", 0, 2, 16, "auto", None, (), 1, 10.0, is_native=False)

    part = load_part(setup, Reduce())

    assert part.fused is None  # though the kernels may be there by now
    assert isinstance(part.backend, CpuAttention)
    assert part.backend._native is None
    assert from_json(RankSetup, to_json(setup)) == setup


def load(path: Path) -> LoadedModel:
    return load_model(path, dtype="auto", block_size=16, kv_cache_memory=1 << 20, num_threads=1)


def test_a_load_does_not_wait_for_kernels_the_next_has_them(llama: Path, held_cc: Path) -> None:
    first = load(llama)  # the compiler waits for us meanwhile
    assert "torch instead of native kernels: they are being built for the next start" in first.notes
    assert first.model._fused is None

    held_cc.write_text("go\n")
    with building(library_folder(os.environ), "engine", time.monotonic() + _WAIT_S):
        pass
    second = load(llama)

    assert second.model._fused is not None
    assert any(note.startswith("native kernels with avx") for note in second.notes)
    assert first.model.info.dtype == second.model.info.dtype == "bfloat16"  # either can read the other's KV
    for loaded in (first, second):
        loaded.model.close()


def test_a_load_without_a_compiler_notes_it(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "no-cc"))
    monkeypatch.setenv("PDSERVE_CACHE_DIR", str(tmp_path / "cache"))

    loaded = load(llama)

    note = f"torch instead of native kernels: CC={tmp_path / 'no-cc'} is not on the path"
    assert note in loaded.notes
    assert not (tmp_path / "cache").exists()
    loaded.model.close()
