"""Check fused layers against the original: both run on the same random rows, each with its own pool."""

from array import array
from typing import Any

import torch

from engine.attention.interface import AttentionOptions
from engine.attention.paged import LayerPool
from engine.attention.reference import ReferenceAttention
from engine.attention.registered import attach
from engine.fused.decoder import FusedDecoder, FusedWeights
from engine.step import BatchSequence, StepBatch
from engine.step_metadata import StepMetadata, build

_ROWS = (12, 1, 5)  # per sequence, prefilled together: enough for every thread
_BLOCK_SIZE = 16
_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""Limit on |difference| / |layer's contribution|; roundings to bfloat16 may resolve a tie either way."""


class Disagreement(Exception):
    """A fused part's result differs from the original's."""


class LayerCheck:
    """Runs the layers of `network` and ours one by one, and records each layer's attention options."""

    def __init__(self, network: Any, weights: FusedWeights) -> None:
        self._network, self._weights = network, weights
        decoder = weights.decoder
        self._metadata = build(_batch(), block_size=_BLOCK_SIZE, device=torch.device("cpu"))
        shape = (2 * len(_ROWS) * _BLOCK_SIZE, decoder.num_kv_heads, decoder.head_dim)
        original, ours = (_pool(shape, weights.dtype) for _ in range(2))
        self._recorder = _Recorder(original, self._metadata)
        attach(network, self._recorder)
        self._fused = FusedDecoder(weights, [ours] * decoder.num_layers, ReferenceAttention())
        numbers = torch.Generator().manual_seed(0)
        rows = torch.randn(sum(_ROWS), weights.sizes.hidden, generator=numbers)
        self._rows = rows.to(weights.dtype)

    def layer(self, index: int) -> None:
        """Compare one layer. Raises Disagreement."""
        angles = self._network.model.rotary_emb(self._rows, position_ids=self._metadata.positions)
        expected = self._network.model.layers[index](
            self._rows[None], position_embeddings=angles, position_ids=self._metadata.positions, attention_mask=None,
            use_cache=False,
        )[0]  # fmt: skip
        self._take(index, self._recorder.options)
        got = self._fused.run_layer(index, self._metadata, self._rows)
        self._compare(f"layer {index}", got - self._rows.float(), expected.float() - self._rows.float())

    def _take(self, index: int, options: AttentionOptions) -> None:
        native = self._weights.layers[index]
        assert options.sinks is None, "no layer that is fused has sinks"
        native.scale, native.softcap, native.window = options.scaling, options.softcap or 0, options.sliding_window or 0
        self._weights.options.append(options)

    def head(self) -> None:
        """Compare the last norm and the output layer. Raises Disagreement."""
        expected = self._network.lm_head(self._network.model.norm(self._rows))
        self._fused.load_rows(self._rows)
        got = self._fused.logits(array("q", range(len(self._rows))))
        self._compare("the output layer", got, expected.float())

    def _compare(self, what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
        difference, size = float((got - expected).norm()), float(expected.norm())
        limit = _TOLERANCE[self._weights.dtype]
        if not difference <= limit * size:  # NaN fails; a zero contribution must be zero here too
            raise Disagreement(
                f"{what} differs from the original by {difference:.2g} in norm, more than {limit:.2g} times {size:.2g}"
            )


class _Recorder:
    """Attention over one pool for any layer; keeps the options of the last call."""

    def __init__(self, pool: LayerPool, metadata: StepMetadata) -> None:
        self._pool, self._metadata = pool, metadata
        self._attention = ReferenceAttention().plan(metadata)
        self.options = AttentionOptions(1.0)

    def run_layer(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See PagedAttention.run_layer."""
        self.options = options
        self._pool.keys[self._metadata.slots] = key.transpose(0, 1)
        self._pool.values[self._metadata.slots] = value.transpose(0, 1)
        return self._attention.attend(query, self._pool.keys, self._pool.values, options)


def _pool(shape: tuple[int, ...], dtype: torch.dtype) -> LayerPool:
    return LayerPool(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))


def _batch() -> StepBatch:
    """Return a step of several prompts with blocks in descending order."""
    sequences, blocks = [], iter(range(2 * len(_ROWS) - 1, -1, -1))
    for count in _ROWS:
        sequences.append(BatchSequence(0, count, (next(blocks), next(blocks))))
    return StepBatch((0,) * sum(_ROWS), tuple(sequences), ())
