"""Find a model's KV tensors, before its weights are read, by running one token with attention that only observes.

A layer that deviates from paged attention is refused here, so an untested model is served correctly or not at all.
"""

from typing import Any

import torch

from engine.attention.interface import AttentionOptions
from engine.attention.registered import NAME, PROBE, Mask, attach, register
from engine.checkpoints.checkpoint import Checkpoint
from engine.network import build_network
from engine.rope import check_rotaries, ignore_lengths
from engine.rope_lengths import longest_sequence
from engine.row_check import check_uncounted
from wire.errors import ConfigError
from wire.kv_layout import KvTensor


class KvProbe:
    """Replaces paged attention during one forward pass and records the KV each layer would write."""

    def __init__(self, dtype: str, *, max_length: int | None = None) -> None:
        """`max_length`: the longest sequence; a sliding window at least that long has no effect."""
        self._dtype = dtype
        self._max_length = max_length
        self._seen: dict[int, tuple[KvTensor, KvTensor]] = {}

    def run_layer(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See LayerHandler.run_layer. A single token attends only to itself: the output is its value."""
        if layer in self._seen:
            raise ConfigError(f"layer {layer} attends twice in one pass: not supported")
        names = (("k", key), ("v", value))
        keys, values = (KvTensor(layer, name, x.shape[0], x.shape[2], self._dtype) for name, x in names)
        self._seen[layer] = (keys, values)
        return value.repeat_interleave(query.shape[0] // value.shape[0], dim=0).transpose(0, 1)

    def see_mask(self, layer: int, mask: Mask | None, requested_window: int | None) -> None:
        """Check the layer's mask, None where it has none: paged attention applies only the window it is called with."""
        if mask is not None and not mask.known:
            raise ConfigError(f"layer {layer} uses a mask that is neither causal nor a sliding window: not supported")
        masked = self._effective_window(mask.window if mask is not None else None)
        requested = self._effective_window(requested_window)
        if masked != requested:
            raise ConfigError(
                f"layer {layer} calls attention with {_window(requested)}, but its mask has {_window(masked)}: "
                "not supported"
            )

    def tensors(self, num_layers: int) -> tuple[KvTensor, ...]:
        """Return the KV tensors of all layers. Raises ConfigError if a layer does not use the attention interface."""
        if sorted(self._seen) != list(range(num_layers)):
            seen = len(self._seen)
            raise ConfigError(f"{seen} of the model's {num_layers} layers use the attention interface, but all must")
        return tuple(tensor for layer in range(num_layers) for tensor in self._seen[layer])

    def _effective_window(self, window: int | None) -> int | None:
        return None if window is not None and self._max_length is not None and window >= self._max_length else window


def _window(size: int | None) -> str:
    return "no window" if size is None else f"a window of {size}"


def rehearse(checkpoint: Checkpoint, dtype: str) -> tuple[KvTensor, ...] | None:
    """Return the KV tensors of the whole model from its shapes alone, or None if its layers read tensor values.

    Raises ConfigError, naming the reason, for a model that cannot be paged.
    """
    register()
    network = build_network(checkpoint, dtype=dtype, attention=PROBE).eval()
    network.set_experts_implementation("batched_mm")  # the one that does not read which experts are chosen
    vars(network.config)["pad_token_id"] = None  # else some models search the tokens for it; vars() avoids a type check
    try:
        check_rotaries(network)
    except ConfigError as error:
        raise ConfigError(f"{checkpoint.path}: {checkpoint.config.model_type}: {error}") from error
    ignore_lengths(network)
    try:
        with torch.device("meta"):
            return _run(network, checkpoint, dtype)
    except RuntimeError:  # meta tensors have no data to read: the loaded network is probed instead
        return None


def find_kv_tensors(network: Any, checkpoint: Checkpoint, dtype: str) -> tuple[KvTensor, ...]:
    """Return the KV tensors of each layer of a loaded network, or of one rank's part of it.

    Raises ConfigError for a model that cannot be paged. Restores the network's attention on return.
    """
    attention, experts = network.config._attn_implementation, network.config._experts_implementation
    network.set_experts_implementation("eager")  # the one that does not sort rows by expert
    try:
        return _run(network, checkpoint, dtype)
    finally:
        network.set_attn_implementation(attention)
        network.set_experts_implementation(experts)


@torch.inference_mode()
def _run(network: Any, checkpoint: Checkpoint, dtype: str) -> tuple[KvTensor, ...]:
    """Run one token to find the KV tensors, and then a step of several rows."""
    text, kind = checkpoint.text_config, checkpoint.config.model_type
    network.set_attn_implementation(PROBE)
    probe = KvProbe(dtype, max_length=longest_sequence(text))
    attach(network, probe)
    place = next(iter(network.parameters())).device
    zero, one = (make(1, 1, dtype=torch.int64, device=place) for make in (torch.zeros, torch.ones))
    try:
        network(input_ids=zero, position_ids=zero, attention_mask=one, use_cache=False)
        tensors = probe.tensors(text.num_hidden_layers)
        network.set_attn_implementation(NAME)
        check_uncounted(network)
        return tensors
    except ConfigError as error:
        raise ConfigError(f"{checkpoint.path}: {kind}: {error}") from error
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise ConfigError(f"{checkpoint.path}: {kind} cannot run from token ids and positions only: {error}") from error
