"""Our attention function as transformers calls it, and what a layer may ask of it."""

from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from engine.attention.interface import AttentionOptions
from wire.errors import ConfigError

NAME = "pdserve_paged"
_HANDLER = "pdserve_attention_handler"
_NEUTRAL = frozenset(
    {
        "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "layer_idx", "logits_to_keep", "max_length_k",
        "max_length_q", "output_attentions", "output_hidden_states", "output_router_logits", "past_key_values",
        "position_embeddings", "position_ids", "return_dict", "use_cache",
    }
)  # fmt: skip


class LayerHandler(Protocol):
    """Who does the work of a layer: the pool's PagedAttention, or the probe of kv_probe.py."""

    def run_layer(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Return [num_tokens, num_heads, value_dim] for [heads, num_tokens, dim] each."""
        ...


def register() -> None:
    """Make NAME a valid `attn_implementation`. No mask function goes with it, so transformers builds no masks."""
    AttentionInterface.register(NAME, _attention)


def attach(network: torch.nn.Module, handler: LayerHandler) -> None:
    """Let every attention module of `network` reach `handler`."""
    for module in network.modules():
        if getattr(module, "layer_idx", None) is not None:
            object.__setattr__(module, _HANDLER, handler)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend one layer of the flattened step: [1, heads, num_tokens, dim] in, [1, num_tokens, heads, dim] out."""
    handler = getattr(module, _HANDLER, None)
    if handler is None or attention_mask is not None:
        raise ConfigError(f"{type(module).__name__} has no layer index or builds its own mask: it cannot run paged")
    options = _options(module, scaling if scaling is not None else query.shape[-1] ** -0.5, kwargs)
    output = handler.run_layer(module.layer_idx, query[0], key[0], value[0], options)
    return output.unsqueeze(0), None


def _options(module: torch.nn.Module, scaling: float, kwargs: dict[str, Any]) -> AttentionOptions:
    """Read what the layer asks for. Raises ConfigError for what no backend does, so nothing is silently left out."""
    kwargs.pop("dropout", None)
    is_causal = kwargs.pop("is_causal", None)
    if (getattr(module, "is_causal", True) if is_causal is None else is_causal) is False:
        raise ConfigError(f"{type(module).__name__} attends in both directions: only causal attention runs paged")
    options = AttentionOptions(
        scaling, kwargs.pop("sliding_window", None), kwargs.pop("softcap", None), kwargs.pop("s_aux", None)
    )
    unknown = sorted(name for name, value in kwargs.items() if value is not None and name not in _NEUTRAL)
    if unknown:
        raise ConfigError(f"{type(module).__name__} asks its attention for {', '.join(unknown)}: not supported")
    return options
