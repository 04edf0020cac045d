"""The logits of a checkpoint's ranks, run together as threads: rank 0's are the model's."""

from pathlib import Path

import torch

from engine.checkpoints.checkpoint import open_checkpoint
from engine.checkpoints.stored_weights import StoredWeights
from engine.network import load_network
from engine.quantization.detect import find_quantization
from engine.quantization.load import plain_weights
from engine.sharding.cut import shard_network
from engine.sharding.hooks import AllReduce
from tests.engine.rank_threads import run_ranks
from wire.kv_layout import Rank


def rank_logits(path: Path, num_ranks: int, token_ids: torch.Tensor) -> list[torch.Tensor]:
    """Return each rank's float32 logits [1, num_tokens, its rows of the output layer] of one pass without KV."""
    checkpoint = open_checkpoint(path)

    def work(number: int, all_reduce: AllReduce) -> torch.Tensor:
        rank = Rank(number, num_ranks)
        with StoredWeights(path) as weights:
            network = load_network(
                checkpoint, plain_weights(weights, find_quantization(path, None), "float32").weights,
                dtype="float32", attention=None,
                shard=lambda whole: shard_network(whole, checkpoint.text_config, rank, all_reduce),
            ).network  # fmt: skip
        logits: torch.Tensor = network(input_ids=token_ids, use_cache=False).logits
        return logits

    return run_ranks(num_ranks, work)
