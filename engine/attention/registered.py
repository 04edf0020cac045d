"""Our attention functions with the signature that transformers calls, and the options that a layer may pass.

name          | masks                                   | for
NAME          | none: the step's metadata replaces them | every step
PROBE         | a description of the mask (Mask)        | one token of engine/kv_probe.py, which checks it
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from engine.attention.interface import AttentionOptions
from wire.errors import ConfigError

NAME = "pdserve_paged"
PROBE = "pdserve_probe"
_HANDLER = "pdserve_attention_handler"
_MASK = "pdserve_mask"
_NEUTRAL = frozenset(
    {
        "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "layer_idx", "logits_to_keep", "max_length_k",
        "max_length_q", "output_attentions", "output_hidden_states", "output_router_logits", "past_key_values",
        "position_embeddings", "position_ids", "return_dict", "use_cache",
    }
)  # fmt: skip


class LayerHandler(Protocol):
    """Computes a layer's attention: the pool's PagedAttention, or the probe of engine/kv_probe.py."""

    def run_layer(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Return [num_tokens, num_heads, value_dim] for [heads, num_tokens, dim] each."""
        ...


@dataclass(frozen=True, slots=True)
class Mask:
    """The mask of transformers: a query at p sees the keys in (p - window, p], unless the mask is not `known`."""

    window: int | None
    known: bool = True


def register() -> None:
    """Make NAME and PROBE valid values of `attn_implementation`.

    No mask function is registered for NAME, so transformers builds no masks.
    """
    AttentionInterface.register(NAME, _attention)
    AttentionInterface.register(PROBE, _probed_attention)
    AttentionMaskInterface.register(PROBE, _described_mask)


def attach(network: torch.nn.Module, handler: LayerHandler) -> None:
    """Set `handler` on every attention module of `network`."""
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
        raise ConfigError(
            f"{type(module).__name__} has no layer index or builds its own mask: it cannot run on a paged KV pool"
        )
    options = _options(module, scaling if scaling is not None else query.shape[-1] ** -0.5, kwargs)
    output = handler.run_layer(module.layer_idx, query[0], key[0], value[0], options)
    return output.unsqueeze(0), None


def _probed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as `_attention` does, and pass the mask to the handler."""
    requested_window = kwargs.get("sliding_window")
    output = _attention(module, query, key, value, None, scaling, **kwargs)
    mask = None if attention_mask is None else getattr(attention_mask, _MASK, Mask(None, known=False))
    getattr(module, _HANDLER).see_mask(module.layer_idx, mask, requested_window)
    return output


def _described_mask(
    *, mask_function: Callable[..., Any], device: torch.device, local_size: int | None = None, **_: Any
) -> torch.Tensor:
    """Return a mask of one element that carries its `Mask`; a mask that the model derives from it carries none."""
    mask = torch.zeros(1, 1, 1, 1, device=device)
    setattr(mask, _MASK, Mask(local_size, known=_is_causal_window(mask_function, local_size)))
    return mask


def _is_causal_window(mask_function: Callable[..., Any], window: int | None) -> bool:
    """Return whether the function admits the same keys as causal attention in `window`, at and around its edge."""
    border = window or 8
    places = sorted({0, 1, border - 1, border, border + 1, 2 * border, 2 * border + 1})
    try:
        return all(
            bool(mask_function(0, 0, *(torch.tensor(place, device="cpu") for place in (query, key))))
            == (key <= query and (window is None or key > query - window))
            for query, key in product(places, places)
        )
    except (RuntimeError, IndexError, TypeError):  # the function indexes the step's tensors, whose length is one
        return False


def _options(module: torch.nn.Module, scaling: float, kwargs: dict[str, Any]) -> AttentionOptions:
    """Return the layer's options. Raises ConfigError for one that no backend supports, so that none is ignored."""
    kwargs.pop("dropout", None)
    is_causal = kwargs.pop("is_causal", None)
    if (getattr(module, "is_causal", True) if is_causal is None else is_causal) is False:
        raise ConfigError(f"{type(module).__name__} attends in both directions: only causal attention runs paged")
    options = AttentionOptions(
        scaling, kwargs.pop("sliding_window", None), kwargs.pop("softcap", None), kwargs.pop("s_aux", None)
    )
    unknown = sorted(name for name, value in kwargs.items() if value is not None and name not in _NEUTRAL)
    if unknown:
        name = type(module).__name__
        raise ConfigError(f"{name} passes {', '.join(unknown)} to its attention, which is not supported")
    return options
