"""Compare a replacement module (device ops) with the original on random rows, with a plain sum as the attention."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine.attention.interface import AttentionOptions
from engine.attention.registered import attach
from engine.modules.joined import shared_tensors
from engine.modules.trial import ROWS, TOLERANCE, rows_by_heads
from telemetry.logs import EventLogger

_log = EventLogger("engine")

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, [1, num_rows, rotary_dim] each."""
Form = tuple[bool, ...] | None
"""Which values of a result tuple are not None; None for a result that is not a tuple."""


@dataclass(frozen=True, slots=True)
class ModuleDifference:
    """How a replacement differs from the original.

    `message` is empty if they cannot be compared, because the original's inputs are unknown or it fails on random rows.
    `is_failure`: the replacement raised, and would raise again.
    """

    message: str
    is_failure: bool = False


class PartCheck:
    """Runs modules of `network` on random rows, with SumAttention as the network's attention handler.

    `shared` has the ids of parameters with several names. The network runs once to record the inputs of its layers,
    such as the angles of its attentions, and whether norms are applied per head.
    """

    def __init__(self, network: Any) -> None:
        self._attention = SumAttention()
        attach(network, self._attention)
        self._network = network
        self.shared = shared_tensors(network)
        self._given: dict[nn.Module, dict[str, Any]] = {}
        self._normed: dict[nn.Module, torch.Size] = {}
        self.before = self._watch()
        """The network's logits for a few tokens, [1, ROWS, vocab_size]; None where they cannot show a change."""

    @torch.inference_mode()
    def differs(self, module: nn.Module, part: Callable[..., Any]) -> ModuleDifference | None:
        """Return how `part` differs from `module`, or None if it does not."""
        inputs = self._inputs(module)
        if inputs is None:
            return ModuleDifference("")
        found = self._find_difference(module, part, inputs)
        if found is not None or not _is_norm(module):
            return found
        rows: torch.Tensor = inputs["hidden_states"]
        is_of_rows = rows.shape[-1] == self._network.config.get_text_config().hidden_size
        for heads in rows_by_heads(rows, self._normed.get(module, rows.shape if is_of_rows else None)):
            found = self._find_difference(module, part, {"hidden_states": heads})
            if found is not None and found.message:  # not a failure of the library: its other norms may be correct
                return ModuleDifference(f"on rows split by heads, {found.message}")
        return None

    def _find_difference(
        self, module: nn.Module, part: Callable[..., Any], inputs: dict[str, Any]
    ) -> ModuleDifference | None:
        rows = inputs["hidden_states"]
        try:
            expected, form, calls = self._run(module, inputs)
        except (RuntimeError, TypeError, ValueError):
            return ModuleDifference("")
        try:
            got, our_form, ours = self._run(part, inputs)
        except Exception as error:  # noqa: BLE001 - third-party kernels may raise anything
            return ModuleDifference(f"it cannot be tried: {' '.join(str(error).split())}", is_failure=True)
        if calls != ours:
            return ModuleDifference(f"it passes {ours} to its attention, but the original passes {calls}")
        if form != our_form:
            return ModuleDifference(
                f"it returns {_describe_form(our_form)}, but the original returns {_describe_form(form)}"
            )
        made = expected - rows if hasattr(module, "self_attn") else expected  # a layer adds to its input rows
        difference, limit = float((got - expected).norm() / made.norm()), TOLERANCE[rows.dtype]
        if difference <= limit:  # false for NaN too
            return None
        return ModuleDifference(f"it differs by {difference:.2g} of the norm, but the limit is {limit:.2g}")

    @torch.inference_mode()
    def options_of(self, module: nn.Module) -> AttentionOptions | None:
        """Return the options that an attention module passes, or None if the module cannot be run."""
        inputs = self._inputs(module)
        if inputs is None:
            return None
        try:
            _, _, calls = self._run(module, inputs)
        except (RuntimeError, TypeError):  # another kind of module, with other inputs
            return None
        return calls[0] if len(calls) == 1 else None

    def angles_of(self, module: nn.Module) -> Angles | None:
        """Return the rotary angles that an attention module receives, or None if it receives no such pair."""
        given = self._given.get(module, {}).get("position_embeddings")
        is_pair = isinstance(given, tuple) and len(given) == 2 and all(torch.is_tensor(one) for one in given)
        return given if is_pair else None

    def same_logits(self, change: Callable[[], None]) -> bool:
        """Return whether the network's logits for a few tokens are the same before and after `change`."""
        before = self._logits()
        change()
        return float((self._logits() - before).norm() / before.norm()) <= TOLERANCE[self.dtype]

    def drift_from(self, before: torch.Tensor) -> float:
        """Return how far a token's logits are from those `before`, relative to their norm; NaN if any of them is NaN.

        The result is the median over the tokens, each compared separately: rounding may route a few to other experts.
        """
        sizes = before.norm(dim=-1).clamp_min(torch.finfo(before.dtype).tiny)  # a padding token's norm may be 0
        return float(((self._logits() - before).norm(dim=-1) / sizes).median())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows between layers."""
        dtype: torch.dtype = self._network.get_input_embeddings().weight.dtype
        return dtype

    def _watch(self) -> torch.Tensor | None:
        """Run the network, record the inputs of its layers, attentions and norms, and return its logits.

        Returns None if the network fails, has no attention, or its logits are not all finite.
        """

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if len(args) + ("hidden_states" in kwargs) == 1:
                self._given[module] = {name: value for name, value in kwargs.items() if name != "hidden_states"}

        def note_rows(module: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], torch.Tensor):
                self._normed[module] = args[0].shape

        modules, norms = ([one for one in self._network.modules() if is_it(one)] for is_it in (_attends, _is_norm))
        hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in modules]
        hooks += [module.register_forward_pre_hook(note_rows) for module in norms]
        try:
            made = self._logits() if modules else None
        except Exception as error:  # noqa: BLE001 - a model's code may raise anything; serving the model reports it
            _log.warning("module_check_failed", network=type(self._network).__name__, error=str(error))
            return None
        finally:
            for hook in hooks:
                hook.remove()
        return made if made is not None and bool(made.isfinite().all()) else None

    @torch.inference_mode()
    def _logits(self) -> torch.Tensor:
        place = self._network.get_input_embeddings().weight.device
        ids = torch.arange(ROWS, device=place)[None] % self._network.config.get_text_config().vocab_size
        positions = torch.arange(ROWS, device=place)[None]
        made: torch.Tensor = self._network(input_ids=ids, position_ids=positions, use_cache=False).logits
        return made.float()

    def _run(
        self, run: Callable[..., Any], inputs: dict[str, Any]
    ) -> tuple[torch.Tensor, Form, list[AttentionOptions]]:
        self._attention.calls = []
        copies = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
        rows = inputs["hidden_states"]
        del copies["hidden_states"]
        same_strides = torch.empty_strided(rows.shape, rows.stride(), dtype=rows.dtype, device=rows.device).copy_(rows)
        made = run(same_strides, **copies)
        form = tuple(one is not None for one in made) if isinstance(made, tuple) else None
        output: torch.Tensor = made[0] if isinstance(made, tuple) else made
        return output.float(), form, self._attention.calls

    def _inputs(self, module: nn.Module) -> dict[str, Any] | None:
        """Return random rows and the other recorded inputs of `module`, or None if its inputs are unknown."""
        numbers, weight = torch.Generator().manual_seed(0), self._network.get_input_embeddings().weight
        if _attends(module) and module not in self._given:
            return None
        width = self._network.config.get_text_config().hidden_size if _attends(module) else _width(module)
        rows = torch.randn(1, ROWS, width, generator=numbers).to(weight.device, weight.dtype)
        return {"hidden_states": rows, **self._given.get(module, {})}


class SumAttention:
    """Implements LayerHandler: mixes query, key and value of each token; records the options.

    Elements of query and key are summed with different weights: a dot product would hide a rotation of both.
    """

    def __init__(self) -> None:
        self.calls: list[AttentionOptions] = []

    def run_layer(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See LayerHandler."""
        self.calls.append(options)
        group = query.shape[0] // key.shape[0]
        keys, values = (rows.repeat_interleave(group, dim=0) for rows in (key, value))
        weights = torch.linspace(-1, 1, query.shape[-1], device=query.device, dtype=query.dtype)
        score = ((query + 2 * keys) * weights).sum(-1, keepdim=True) / query.shape[-1] ** 0.5
        made: torch.Tensor = (values + score).transpose(0, 1)
        return made


def _attends(module: nn.Module) -> bool:
    """Return whether the module is an attention module, or a layer with one."""
    return any(isinstance(getattr(module, name, None), nn.Module) for name in ("self_attn", "o_proj"))


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RMSNorm")


def _describe_form(form: Form) -> str:
    return "only its rows" if form is None else f"a tuple of length {len(form)} with {sum(form)} not None"


def _width(module: Any) -> int:
    """Return the width of a module's input rows."""
    if hasattr(module, "gate_proj"):
        return int(module.gate_proj.in_features)
    if hasattr(module, "in_features"):  # quantised layers have no weight
        return int(module.in_features)
    return int(module.weight.shape[-1])
