"""Is a part by a device's ops the original? Both run on the same random rows; attention answers with a sum."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine.attention.interface import AttentionOptions
from engine.attention.registered import attach
from engine.modules.joined import shared_tensors
from engine.modules.trial import ROWS, TOLERANCE
from telemetry.logs import EventLogger

_log = EventLogger("engine")

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, [1, num_rows, rotary_dim] each."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How a part differs from the original, in words; "" where the original is of another kind: it takes other inputs.

    `is_failure`: the part raised, and would do so again.
    """

    words: str
    is_failure: bool = False


class PartCheck:
    """Runs modules of `network` on random rows, with an attention of its own while it lives.

    `shared` has the ids of parameters with several names. The network runs once, so that its layers are tried with
    what it gives them, as the angles of its attentions.
    """

    def __init__(self, network: Any) -> None:
        self._attention = SumAttention()
        attach(network, self._attention)
        self._network = network
        self.shared = shared_tensors(network)
        self._given: dict[nn.Module, dict[str, Any]] = {}
        self._watch()

    @torch.inference_mode()
    def differs(self, module: nn.Module, part: Callable[..., Any]) -> Difference | None:
        """Return how `part` differs from `module`, None where it is the same."""
        inputs = self._inputs(module)
        if inputs is None:
            return Difference("")
        rows = inputs["hidden_states"]
        try:
            expected, asked = self._run(module, inputs)
        except (RuntimeError, TypeError, ValueError):
            return Difference("")
        try:
            got, ours = self._run(part, inputs)
        except Exception as error:  # noqa: BLE001 - another project's kernels: what they raise is not known
            return Difference(f"it cannot be tried: {' '.join(str(error).split())}", is_failure=True)
        if asked != ours:
            return Difference(f"it asks its attention for {ours}, the original for {asked}")
        made = expected - rows if hasattr(module, "self_attn") else expected  # a layer hands its rows through
        difference, limit = float((got - expected).norm() / made.norm()), TOLERANCE[rows.dtype]
        if difference <= limit:  # false for NaN too
            return None
        return Difference(f"it differs by {difference:.2g} of the norm, {limit:.2g} is allowed")

    @torch.inference_mode()
    def options_of(self, module: nn.Module) -> AttentionOptions | None:
        """Return what a module of attention asks for; None where it cannot be tried."""
        inputs = self._inputs(module)
        if inputs is None:
            return None
        try:
            _, asked = self._run(module, inputs)
        except (RuntimeError, TypeError):  # of another kind: it wants other inputs
            return None
        return asked[0] if len(asked) == 1 else None

    def angles_of(self, module: nn.Module) -> Angles | None:
        """Return the angles that a module of attention turns by; None where it is given none, or in another form."""
        given = self._given.get(module, {}).get("position_embeddings")
        is_pair = isinstance(given, tuple) and len(given) == 2 and all(torch.is_tensor(one) for one in given)
        return given if is_pair else None

    def same_logits(self, change: Callable[[], None]) -> bool:
        """Whether the whole network makes the same of a few tokens before and after `change`."""
        before = self._logits()
        change()
        after = self._logits()
        return float((after - before).norm() / before.norm()) <= TOLERANCE[self.dtype]

    @property
    def dtype(self) -> torch.dtype:
        """That of the rows that go from layer to layer."""
        dtype: torch.dtype = self._network.get_input_embeddings().weight.dtype
        return dtype

    def _watch(self) -> None:
        """Run the network, and note what each layer and its attention are given; nothing where it cannot run."""

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if len(args) + ("hidden_states" in kwargs) == 1:
                self._given[module] = {name: value for name, value in kwargs.items() if name != "hidden_states"}

        modules = [module for module in self._network.modules() if _attends(module)]
        hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in modules]
        try:
            if modules:
                self._logits()
        except Exception as error:  # noqa: BLE001 - of any model's own code; who serves it says so
            _log.warning("layers_unknown", network=type(self._network).__name__, error=str(error))
        finally:
            for hook in hooks:
                hook.remove()

    @torch.inference_mode()
    def _logits(self) -> torch.Tensor:
        place = self._network.get_input_embeddings().weight.device
        ids = torch.arange(ROWS, device=place)[None] % self._network.config.get_text_config().vocab_size
        positions = torch.arange(ROWS, device=place)[None]
        made: torch.Tensor = self._network(input_ids=ids, position_ids=positions, use_cache=False).logits
        return made.float()

    def _run(self, run: Callable[..., Any], inputs: dict[str, Any]) -> tuple[torch.Tensor, list[AttentionOptions]]:
        self._attention.asked = []
        copies = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
        hidden_states = copies.pop("hidden_states")
        made = run(hidden_states, **copies)
        output: torch.Tensor = made[0] if isinstance(made, tuple) else made
        return output.float(), self._attention.asked

    def _inputs(self, module: nn.Module) -> dict[str, Any] | None:
        """Return what `module` takes: rows, and what else the network gave it; None where that is not known."""
        numbers, weight = torch.Generator().manual_seed(0), self._network.get_input_embeddings().weight
        if _attends(module) and module not in self._given:
            return None
        width = self._network.config.get_text_config().hidden_size if _attends(module) else _width(module)
        rows = torch.randn(1, ROWS, width, generator=numbers).to(weight.device, weight.dtype)
        return {"hidden_states": rows, **self._given.get(module, {})}


class SumAttention:
    """Implements LayerHandler: mixes query, key and value of each token alone; notes what was asked.

    Each number of a query and a key counts in its own way: their product would be the same for any angle of both.
    """

    def __init__(self) -> None:
        self.asked: list[AttentionOptions] = []

    def run_layer(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See LayerHandler."""
        self.asked.append(options)
        group = query.shape[0] // key.shape[0]
        keys, values = (rows.repeat_interleave(group, dim=0) for rows in (key, value))
        weights = torch.linspace(-1, 1, query.shape[-1], device=query.device, dtype=query.dtype)
        score = ((query + 2 * keys) * weights).sum(-1, keepdim=True) / query.shape[-1] ** 0.5
        made: torch.Tensor = (values + score).transpose(0, 1)
        return made


def _attends(module: nn.Module) -> bool:
    """Whether it is an attention, or a layer with one."""
    return any(isinstance(getattr(module, name, None), nn.Module) for name in ("self_attn", "o_proj"))


def _width(module: Any) -> int:
    """Return how wide the rows are that a module takes."""
    if hasattr(module, "gate_proj"):
        return int(module.gate_proj.in_features)
    if hasattr(module, "in_features"):  # quantised layers have no weight
        return int(module.in_features)
    return int(module.weight.shape[-1])
