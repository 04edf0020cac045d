"""Find a model's KV tensors by running one token through it with an attention that only looks."""

import torch

from engine.attention.interface import AttentionOptions
from wire.errors import ConfigError
from wire.kv_layout import KvTensor


class KvProbe:
    """Stands in for paged attention during one forward pass and notes what each layer would write."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._seen: dict[int, tuple[KvTensor, KvTensor]] = {}

    def run_layer(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See LayerHandler.run_layer. One token attends to itself alone: the output is its value."""
        if layer in self._seen:
            raise ConfigError(f"layer {layer} attends twice in one pass: not supported")
        names = (("k", key), ("v", value))
        keys, values = (KvTensor(layer, name, x.shape[0], x.shape[2], self._dtype) for name, x in names)
        self._seen[layer] = (keys, values)
        return value.repeat_interleave(query.shape[0] // value.shape[0], dim=0).transpose(0, 1)

    def tensors(self, num_layers: int) -> tuple[KvTensor, ...]:
        """Return the KV tensors of all layers. Raises ConfigError if a layer keeps its state elsewhere."""
        if sorted(self._seen) != list(range(num_layers)):
            seen = len(self._seen)
            raise ConfigError(f"{seen} of the model's {num_layers} layers use the attention interface: not supported")
        return tuple(tensor for layer in range(num_layers) for tensor in self._seen[layer])
