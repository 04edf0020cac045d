"""Parts of a loaded network that run by ops of torch_npu from now on. What is not known, or not the same, stays.

part            | known by                                       | op
norm            | class *RMSNorm, a weight, an epsilon           | npu_rms_norm
gated MLP       | gate_proj, up_proj, down_proj, silu            | npu_swiglu, one product for gate and up
attention       | q_proj to o_proj, angles as its second input   | npu_apply_rotary_pos_emb, or npu_rotary_mul
decoder layer   | both norms, MLP and attention are such parts   | npu_add_rms_norm between attention and MLP

Inner parts come first. Each is compared with the original on random rows (modules_check.py) before it is kept: a part's
`forward` is set on the module itself, which keeps its name, its attributes and its place.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.attention.interface import AttentionOptions
from engine.attention.registered import NAME
from engine.npu.modules_check import PartCheck
from telemetry.logs import EventLogger

_log = EventLogger("engine")
_FUSED_ROTARY_DIMS = (64, 128)
_ROTARY_LIMIT = 896
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")
STAYED = "as they were, because they differ"
"""Stands in the line for people where an op computes something else than the original."""


def replace_modules(network: Any) -> tuple[str, ...]:
    """Replace what is known in `network`, which runs our attention; return a line on what was, for people.

    It has another handler of its attention on return.
    """
    check, replaced, stayed = PartCheck(network), Counter[str](), Counter[str]()
    for kind, make in _PARTS.items():
        for name, module in list(network.named_modules()):
            why = _replace(module, make, check)
            if why is None:
                replaced[kind] += 1
            elif why:
                if not stayed[kind]:
                    _log.warning("npu_part_stays", first=name, module=type(module).__name__, reason=why)
                stayed[kind] += 1
    words = [f"{count} {kind}" for kind, count in replaced.items()]
    kept = [f"{count} {kind}" for kind, count in stayed.items()]
    line = f"by NPU ops: {', '.join(words) or 'nothing'}"
    return (f"{line}; {STAYED}: {', '.join(kept)}" if kept else line,)


def _replace(module: nn.Module, make: Callable[[nn.Module, PartCheck], Any], check: PartCheck) -> str | None:
    """Return None where the module runs by our part now, why not in words, or "" where it is none that we know."""
    if any((module._forward_hooks, module._forward_pre_hooks, "forward" in module.__dict__)):
        return ""
    part = make(module, check)
    if part is None:
        return ""
    why: str | None = check.differs(module, part)
    if why is None:
        module.forward = part
        part.settle()
    return why


class RmsNorm:
    """A norm by npu_rms_norm, which rounds once where transformers rounds twice."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        self.weight, self.epsilon = weight, epsilon

    @classmethod
    def of(cls, module: nn.Module, check: PartCheck) -> "RmsNorm | None":
        """Return the part for a module, None where it is no norm that we know."""
        weight = getattr(module, "weight", None)
        epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not type(module).__name__.endswith("RMSNorm") or not isinstance(epsilon, float):
            return None
        return cls(weight, epsilon) if isinstance(weight, torch.Tensor) and weight.dim() == 1 else None

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = torch.ops.npu.npu_rms_norm(hidden_states, self.weight, self.epsilon)[0]
        return normed

    def settle(self) -> None:
        """Nothing of the original is freed."""


class GatedMlp:
    """down(silu(gate(x)) * up(x)): gate and up are one product, and npu_swiglu makes one of its halves."""

    def __init__(self, module: Any) -> None:
        self._module = module
        gate, up = module.gate_proj, module.up_proj
        self._weight = torch.cat([gate.weight.detach(), up.weight.detach()])
        self._bias = None if gate.bias is None else torch.cat([gate.bias.detach(), up.bias.detach()])

    @classmethod
    def of(cls, module: nn.Module, check: PartCheck) -> "GatedMlp | None":
        """Return the part for a module, None where it is no gated MLP of plain linear layers."""
        gate, up, down = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
        if not (_is_plain(gate) and _is_plain(up) and isinstance(down, nn.Module)):
            return None
        assert isinstance(gate, nn.Linear)
        assert isinstance(up, nn.Linear)
        if (gate.bias is None) != (up.bias is None) or gate.out_features != up.out_features:
            return None
        return cls(module)

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        both = nn.functional.linear(hidden_states, self._weight, self._bias)
        made: torch.Tensor = self._module.down_proj(torch.ops.npu.npu_swiglu(both))
        return made

    def settle(self) -> None:
        """The two are one now: free them."""
        del self._module.gate_proj, self._module.up_proj


class RotaryAttention:
    """An attention module whose queries and keys are turned by an NPU op."""

    def __init__(self, module: Any, options: AttentionOptions) -> None:
        """`options` are what the original asks its attention for."""
        self._module, self._options = module, options

    @classmethod
    def of(cls, module: nn.Module, check: PartCheck) -> "RotaryAttention | None":
        """Return the part for a module, None where it is no attention that we know."""
        if not all(isinstance(getattr(module, name, None), nn.Module) for name in _PROJECTIONS):
            return None
        head_dim = getattr(module, "head_dim", None)
        if not isinstance(head_dim, int) or head_dim % 2 or head_dim >= _ROTARY_LIMIT:
            return None
        options = check.options_of(module)
        return None if options is None or options.sinks is not None else cls(module, options)

    def __call__(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: Any
    ) -> tuple[torch.Tensor, None]:
        module, options = self._module, self._options
        shape = (*hidden_states.shape[:-1], -1, module.head_dim)  # [1, num_tokens, heads, head_dim]
        query, key = module.q_proj(hidden_states).view(shape), module.k_proj(hidden_states).view(shape)
        if hasattr(module, "q_norm"):
            query, key = module.q_norm(query), module.k_norm(key)
        query, key = rotate(query, key, *position_embeddings)
        value = module.v_proj(hidden_states).view(shape)
        output, _weights = ALL_ATTENTION_FUNCTIONS[NAME](
            module, *(rows.transpose(1, 2) for rows in (query, key, value)), None, scaling=options.scaling,
            sliding_window=options.sliding_window, softcap=options.softcap,
        )  # fmt: skip
        return module.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), None

    def settle(self) -> None:
        """Nothing of the original is freed."""


class AddedLayer:
    """A decoder layer that adds what attention made and norms the sum in one op."""

    def __init__(self, module: Any) -> None:
        self._module, self._norm = module, module.post_attention_layernorm.forward

    @classmethod
    def of(cls, module: nn.Module, check: PartCheck) -> "AddedLayer | None":
        """Return the part for a module, None where its own parts are not all ours."""
        ours = {"self_attn": RotaryAttention, "mlp": GatedMlp, **dict.fromkeys(_NORMS, RmsNorm)}
        parts = (getattr(getattr(module, name, None), "forward", None) for name in ours)
        known = all(isinstance(part, kind) for part, kind in zip(parts, ours.values(), strict=True))
        return cls(module) if known else None

    def __call__(self, hidden_states: torch.Tensor, **inputs: Any) -> torch.Tensor:
        module, norm = self._module, self._norm
        attended, _weights = module.self_attn(hidden_states=module.input_layernorm(hidden_states), **inputs)
        normed, _rstd, added = torch.ops.npu.npu_add_rms_norm(attended, hidden_states, norm.weight, norm.epsilon)
        made: torch.Tensor = added + module.mlp(normed)
        return made

    def settle(self) -> None:
        """Nothing of the original is freed."""


_PARTS: dict[str, Callable[[nn.Module, PartCheck], Any]] = {
    "norms": RmsNorm.of, "gated MLPs": GatedMlp.of, "attentions": RotaryAttention.of, "layers": AddedLayer.of,
}  # fmt: skip


def rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return query and key, [1, num_tokens, heads, head_dim], turned by angles [1, num_tokens, head_dim].

    The fused op writes into its inputs and takes two sizes of heads; the other takes one tensor of any even size.
    """
    cos, sin = (table.to(query.dtype).unsqueeze(2) for table in (cos, sin))
    if query.shape[-1] in _FUSED_ROTARY_DIMS:
        turned: tuple[torch.Tensor, torch.Tensor] = torch.ops.npu.npu_apply_rotary_pos_emb(
            query.contiguous(), key.contiguous(), cos, sin, layout="BSND"
        )
        return turned
    return torch.ops.npu.npu_rotary_mul(query, cos, sin), torch.ops.npu.npu_rotary_mul(key, cos, sin)


def _is_plain(module: object) -> bool:
    """Whether it is a linear layer that nothing else has changed."""
    return type(module) is nn.Linear and not module._forward_hooks and not module._forward_pre_hooks
