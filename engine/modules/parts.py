"""The known parts of a network, computed by a library's ops.

part            | recognised by                                | gain
norm            | class *RMSNorm, a weight, an epsilon         | one op
gated MLP       | gate_proj, up_proj, down_proj, an activation | one product for gate and up, one op for both halves
attention       | q_proj to o_proj, angles among its inputs    | one product for q, k and v, one op for the angles
decoder layer   | its norms are replaced                       | one op for a sum and its norm

`of` yields the parts that may compute a module, likeliest first; a comparison (check.py) decides. `free_originals` is
called when a part is kept.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.attention.interface import AttentionOptions
from engine.attention.registered import NAME
from engine.modules.activations import activation_of
from engine.modules.check import PartCheck
from engine.modules.interface import AddNormOp, GateOp, ModuleOps, NormOp, NormWeight, RotateOp
from engine.modules.joined import JoinedLinear

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class RmsNorm:
    """A norm by one op, which rounds once, while transformers rounds twice."""

    def __init__(self, weight: NormWeight, run: NormOp) -> None:
        self.weight, self._run = weight, run

    @classmethod
    def of(cls, module: nn.Module, ops: ModuleOps, check: PartCheck) -> Iterator["RmsNorm"]:
        """Yield the norm with its weight, then the norm with 1 added to its weight."""
        weight = getattr(module, "weight", None)
        epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not type(module).__name__.endswith("RMSNorm") or not isinstance(epsilon, float):
            return
        if not isinstance(weight, torch.Tensor) or weight.dim() != 1:
            return
        for adds_one in (False, True):
            norm = NormWeight(weight, epsilon, adds_one)
            run = ops.norm(norm)
            if run is not None:
                yield cls(norm, run)

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._run(hidden_states)

    def free_originals(self) -> None:
        """Do nothing: no weight of the original is freed."""


class GatedMlp:
    """down(act(gate(x)) * up(x))."""

    def __init__(self, module: Any, both: JoinedLinear, gate: GateOp) -> None:
        self._module, self._both, self._gate = module, both, gate

    @classmethod
    def of(cls, module: nn.Module, ops: ModuleOps, check: PartCheck) -> Iterator["GatedMlp"]:
        """Yield the part if `module` is a gated MLP of plain linear layers."""
        gate, up, down = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
        activation = activation_of(getattr(module, "act_fn", None))
        if activation is None or not isinstance(down, nn.Module) or not isinstance(gate, nn.Linear):
            return
        run = ops.gate(activation, gate.weight.dtype)
        both = None if run is None else JoinedLinear.of((gate, up), check.shared)
        if run is not None and both is not None and both.sizes[0] == both.sizes[1]:
            yield cls(module, both, run)

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self._module.down_proj(self._gate(self._both(hidden_states)))
        return made

    def free_originals(self) -> None:
        """Free the weights of the two joined layers."""
        self._both.free_originals()


class RotaryAttention:
    """An attention module with one product for queries, keys and values, and one op that rotates queries and keys."""

    def __init__(self, module: Any, options: AttentionOptions, rotate: RotateOp, joined: JoinedLinear | None) -> None:
        """`options` are those that the original passes to its attention."""
        self._module, self._options, self._rotate, self._joined = module, options, rotate, joined

    @classmethod
    def of(cls, module: nn.Module, ops: ModuleOps, check: PartCheck) -> Iterator["RotaryAttention"]:
        """Yield the part if `module` is an attention that rotates whole heads."""
        named = [getattr(module, name, None) for name in (*_PROJECTIONS, "o_proj")]
        head_dim, angles = getattr(module, "head_dim", None), check.angles_of(module)
        if not all(isinstance(one, nn.Module) for one in named) or not isinstance(head_dim, int) or angles is None:
            return
        rotate = ops.rotate(head_dim, check.dtype) if angles[0].shape[-1] == head_dim else None
        options = None if rotate is None else check.options_of(module)
        if rotate is not None and options is not None and options.sinks is None:
            joined = JoinedLinear.of(named[:3], check.shared) if ops.joins_heads else None
            yield cls(module, options, rotate, joined)

    def __call__(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: Any
    ) -> tuple[torch.Tensor, None]:
        module, options = self._module, self._options
        shape = (*hidden_states.shape[:-1], -1, module.head_dim)  # [1, num_tokens, heads, head_dim]
        query, key, value = (rows.view(shape) for rows in self._project(hidden_states))
        if hasattr(module, "q_norm"):
            query, key = module.q_norm(query), module.k_norm(key)
        query, key = self._rotate(query, key, *position_embeddings)
        output, _weights = ALL_ATTENTION_FUNCTIONS[NAME](
            module, *(rows.transpose(1, 2) for rows in (query, key, value)), None, scaling=options.scaling,
            sliding_window=options.sliding_window, softcap=options.softcap,
        )  # fmt: skip
        return module.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), None

    def _project(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self._joined is not None:
            return torch.split(self._joined(rows), self._joined.sizes, dim=-1)
        return tuple(getattr(self._module, name)(rows) for name in _PROJECTIONS)

    def free_originals(self) -> None:
        """Free the weights of the three layers if they were joined."""
        if self._joined is not None:
            self._joined.free_originals()


class AddedLayer:
    """A decoder layer that adds the attention's output and norms the sum in one op.

    Where that op overwrites its inputs, the layer's input is lost, unless `keeps_input`.
    """

    keeps_input = False
    names: ClassVar[tuple[str, ...]] = ("input_layernorm", "post_attention_layernorm")

    def __init__(self, module: Any, add_norm: AddNormOp, *, overwrites: bool) -> None:
        self.module, self._add_norm, self.overwrites = module, add_norm, overwrites

    @classmethod
    def of(cls, module: nn.Module, ops: ModuleOps, check: PartCheck) -> Iterator["AddedLayer"]:
        """Yield the part if the layer's norms are replaced: before and after attention and MLP, or only before."""
        if not all(isinstance(getattr(module, name, None), nn.Module) for name in ("self_attn", "mlp")):
            return
        for kind in (SandwichLayer, AddedLayer):
            norms = [getattr(getattr(module, name, None), "forward", None) for name in kind.names]
            if norms and isinstance(norms[-1], RmsNorm) and all(isinstance(norm, RmsNorm) for norm in norms):
                add_norm = ops.add_norm(norms[-1].weight)
                if add_norm is not None:
                    yield kind(module, add_norm, overwrites=ops.overwrites)
                return

    def __call__(self, hidden_states: torch.Tensor, **inputs: Any) -> torch.Tensor:
        normed, added = self.add(self.attend(hidden_states, inputs), hidden_states)
        made: torch.Tensor = added + self.module.mlp(normed)
        return made

    def attend(self, hidden_states: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        """Return the attention's output for the normed input."""
        module = self.module
        attended: torch.Tensor = module.self_attn(hidden_states=module.input_layernorm(hidden_states), **inputs)[0]
        return attended

    def add(self, made: torch.Tensor, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of the sum, and the sum."""
        keeps = self.overwrites and self.keeps_input
        return self._add_norm(made, hidden_states.clone() if keeps else hidden_states)

    def free_originals(self) -> None:
        """Do nothing: no weight of the original is freed."""


class SandwichLayer(AddedLayer):
    """A decoder layer that also norms the outputs of attention and MLP before adding them."""

    names = (
        "input_layernorm", "post_attention_layernorm", "post_feedforward_layernorm", "pre_feedforward_layernorm",
    )  # fmt: skip

    def __call__(self, hidden_states: torch.Tensor, **inputs: Any) -> torch.Tensor:
        module = self.module
        attended = module.post_attention_layernorm(self.attend(hidden_states, inputs))
        normed, added = self.add(attended, hidden_states)
        made: torch.Tensor = added + module.post_feedforward_layernorm(module.mlp(normed))
        return made
