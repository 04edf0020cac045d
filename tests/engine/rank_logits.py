"""The networks of a checkpoint's ranks, and their logits, run together as threads: rank 0's are the model's."""

from pathlib import Path
from typing import Any

import torch

from engine.checkpoints.checkpoint import open_checkpoint
from engine.checkpoints.stored_weights import StoredWeights
from engine.network import load_network
from engine.quantization.detect import find_quantization
from engine.quantization.load import make_keeper, plain_weights
from engine.sharding.cut import shard_network
from engine.sharding.hooks import AllReduce
from tests.engine.rank_threads import run_ranks
from wire.kv_layout import Rank


def load_rank(
    path: Path, rank: Rank, all_reduce: AllReduce, *, dtype: str = "float32", formats: tuple[str, ...] = ()
) -> Any:
    """Return a rank's network with transformers' attention; its quantised layers stay so in `formats`."""
    checkpoint, layout = open_checkpoint(path), find_quantization(path, None)
    with StoredWeights(path) as weights:
        plain = plain_weights(weights, layout, dtype, formats)
        return load_network(
            checkpoint, plain.weights, dtype=dtype, attention=None,
            shard=lambda whole: shard_network(whole, checkpoint.text_config, rank, all_reduce),
            keep=make_keeper(plain, layout, formats), adds_biases=layout is not None and layout.adds_biases,
        ).network  # fmt: skip


def rank_logits(
    path: Path, num_ranks: int, token_ids: torch.Tensor, *, dtype: str = "float32", formats: tuple[str, ...] = ()
) -> list[torch.Tensor]:
    """Return each rank's logits [1, num_tokens, its rows of the output layer] of one pass without KV."""

    def work(number: int, all_reduce: AllReduce) -> torch.Tensor:
        network = load_rank(path, Rank(number, num_ranks), all_reduce, dtype=dtype, formats=formats)
        logits: torch.Tensor = network(input_ids=token_ids, use_cache=False).logits
        return logits

    return run_ranks(num_ranks, work)
