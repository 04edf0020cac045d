"""What loading costs a rank: it reads only its slices, and holds little more than its shard of a large model."""

import functools
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from engine.checkpoints.checkpoint import open_checkpoint
from engine.checkpoints.default_model import ensure_default_model
from engine.checkpoints.stored_weights import StoredWeights
from engine.network import load_network
from engine.sharding.cut import shard_network
from pdserve.run_folder import default_cache_dir
from tests.engine.tiny_models import save_tiny_tokenizer
from wire.kv_layout import Rank

pytestmark = [pytest.mark.long]

_GIB = 1 << 30
_LARGE: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "num_hidden_layers": 14, "max_position_embeddings": 512, "head_dim": 128,
}  # fmt: skip


def _owned_bytes(config: Any, rank: int, num_ranks: int, item: int) -> int:
    """Count, by the config alone, what a rank of a Llama owns: its slices and the tensors that are whole everywhere."""
    heads, kv, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    kv_held = kv // num_ranks + (rank < kv % num_ranks)
    held = kv_held * (heads // kv)
    hidden, inner = config.hidden_size, config.intermediate_size // num_ranks
    layer = hidden * dim * (2 * held + 2 * kv_held) + 3 * hidden * inner + 2 * hidden
    head = 0 if config.tie_word_embeddings else hidden * (config.vocab_size if rank == 0 else 16)
    return int(item * (config.num_hidden_layers * layer + config.vocab_size * hidden + hidden + head))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_its_slices_plus_two_percent_at_most(rank: int) -> None:
    path = ensure_default_model(default_cache_dir(os.environ), lambda words: None)
    checkpoint = open_checkpoint(path)
    config = checkpoint.text_config
    shard = functools.partial(shard_network, config=config, rank=Rank(rank, 2), all_reduce=lambda tensor: None)
    before = _read_by_this_process()

    with StoredWeights(path) as weights:
        load_network(checkpoint, weights, dtype="bfloat16", attention=None, shard=shard)

    owned = _owned_bytes(config, rank, 2, 2)
    assert owned <= weights.bytes_read <= 1.02 * owned
    assert weights.bytes_read <= _read_by_this_process() - before <= 1.02 * owned + (4 << 20)  # headers, configs


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Path]:
    """A folder whose files are gone after the test: pytest keeps those of the last runs."""
    yield tmp_path
    for file in tmp_path.iterdir():
        file.unlink()


_PEAK = """
import json, resource, sys
from engine.ranks.rank_part import load_part
from engine.ranks.reduce import Reduce
from engine.ranks.setup import RankSetup
setup = RankSetup(sys.argv[1], "bfloat16", int(sys.argv[2]), 2, 16, "auto", None, (), 1, 10.0)
part = load_part(setup, Reduce())
peak = int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))) * 1024
print(json.dumps([peak, part.loaded.weight_bytes, part.loaded.bytes_read]))
"""


def test_a_rank_of_a_large_model_peaks_little_above_its_shard(large: Path) -> None:
    _write_random(large)
    stored = sum(file.stat().st_size for file in large.glob("*.safetensors"))
    assert stored >= 6 * _GIB

    for rank in range(2):
        command = [sys.executable, "-P", "-c", _PEAK, str(large), str(rank)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=True)

        peak, shard, read = json.loads(done.stdout)
        assert shard == _owned_bytes(LlamaConfig(**_LARGE), rank, 2, 2)
        assert read <= 1.02 * shard
        assert peak <= 1.2 * shard + _GIB, f"rank {rank}: {peak / _GIB:.2f} GiB for {shard / _GIB:.2f}"


def _write_random(folder: Path) -> None:
    """Write a bfloat16 Llama of 6 GiB, its data one random mebibyte again and again, as safetensors by hand."""
    config = LlamaConfig(**_LARGE, architectures=["LlamaForCausalLM"], dtype="bfloat16")
    config.save_pretrained(folder)
    save_tiny_tokenizer(folder)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    header, offset = {}, 0
    for name, tensor in network.state_dict().items():
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    raw = json.dumps(header).encode()
    mebibyte = random.Random(0).randbytes(1 << 20)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for start in range(0, offset, 1 << 20):
            file.write(mebibyte[: min(1 << 20, offset - start)])


def _read_by_this_process() -> int:
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))
