"""Replace parts of a loaded network by a device's ops. A part that is unknown or differs is not replaced.

Inner parts are replaced first. Each is compared with the original on random rows (check.py); the first library whose
part is equal is used: the part becomes the `forward` of the module, which keeps its name, its attributes and its
parent. A library that raises for a kind of part is not tried for that kind again. At the end the logits of the whole
network are compared with the original ones: while they differ, the original parts are restored kind by kind, outer
kinds first.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from engine.modules.check import ModuleDifference, PartCheck
from engine.modules.interface import ModuleOps
from engine.modules.parts import AddedLayer, GatedMlp, RmsNorm, RotaryAttention
from engine.modules.trial import network_tolerance
from telemetry.logs import EventLogger

_log = EventLogger("engine")
STAYED = "not replaced"
"""Part of the log line if an op fails or differs from the original."""

Maker = Callable[[nn.Module, ModuleOps, PartCheck], Iterator[Any]]
PARTS: dict[str, Maker] = {
    "norms": RmsNorm.of, "gated MLPs": GatedMlp.of, "attentions": RotaryAttention.of, "layers": AddedLayer.of,
}  # fmt: skip


def replace_modules(network: Any, libraries: Sequence[ModuleOps]) -> tuple[str, ...]:
    """Replace the known parts of `network`, which runs our attention; return a line for the log.

    Replaces the attention handler of `network`.
    """
    return (_Replacing(network, libraries).run(),)


class _Replacing:
    """Owns the results for each kind of part."""

    def __init__(self, network: Any, libraries: Sequence[ModuleOps]) -> None:
        self._network, self._libraries, self._check = network, tuple(libraries), PartCheck(network)
        self._replaced: dict[str, Counter[str]] = {ops.name: Counter() for ops in libraries}
        self._stayed, self._left = Counter[str](), set[tuple[str, str]]()
        self._layers: list[AddedLayer] = []
        self._kept: dict[str, list[tuple[str, nn.Module]]] = {kind: [] for kind in PARTS}

    def run(self) -> str:
        """Replace all; return the line."""
        for kind, make in PARTS.items():
            for name, module in list(self._network.named_modules()):
                if _is_free(module):
                    self._replace(kind, make, name, module)
        self._keep_inputs()
        if self._check.before is not None:
            self._put_back(self._check.before)
        lines = [
            f"by {name}: {', '.join(f'{count} {kind}' for kind, count in counts.items())}"
            for name, counts in self._replaced.items() if counts
        ]  # fmt: skip
        line = "; ".join(lines) or f"by {self._libraries[0].name}: nothing"
        stayed = ", ".join(f"{count} {kind}" for kind, count in self._stayed.items())
        return f"{line}; {STAYED}: {stayed}" if stayed else line

    def _replace(self, kind: str, make: Maker, name: str, module: nn.Module) -> None:
        reasons: list[str] = []
        for ops in self._libraries:
            difference = self._try(kind, make, ops, module)
            if difference is None:
                self._replaced[ops.name][kind] += 1
                self._kept[kind].append((ops.name, module))
                return
            if difference.is_failure:
                self._left.add((ops.name, kind))
                _log.warning("ops_disabled", library=ops.name, parts=kind, reason=difference.message)
            reasons += [difference.message] if difference.message else []
        if reasons:
            if not self._stayed[kind]:
                _log.warning(
                    "module_not_replaced", parts=kind, name=name, module=type(module).__name__, reason=reasons[0],
                    reported="first_of_kind",
                )  # fmt: skip
            self._stayed[kind] += 1

    def _try(self, kind: str, make: Maker, ops: ModuleOps, module: nn.Module) -> ModuleDifference | None:
        """Return None if the module now runs a part of `ops`, else how the likeliest part differs."""
        found = ModuleDifference("")
        try:
            for part in make(module, ops, self._check):
                if (ops.name, kind) in self._left:
                    return ModuleDifference("its library failed before")
                difference = self._check.differs(module, part)
                if difference is None:
                    module.forward = part
                    part.free_originals()
                    self._layers += [part] if isinstance(part, AddedLayer) else []
                    return None
                found = difference if not found.message else found
        except torch.OutOfMemoryError as error:
            return ModuleDifference(f"out of memory while joining its weights: {' '.join(str(error).split())}")
        return found

    def _put_back(self, before: torch.Tensor) -> None:
        """Restore the original parts kind by kind, outer ones first, until the network's logits match."""
        limit = network_tolerance(self._check.dtype, self._network.config.get_text_config().num_hidden_layers)
        for kind, kept in reversed(self._kept.items()):
            if not kept:
                continue
            drift = self._check.drift_from(before)
            if drift <= limit:  # false for NaN too
                return
            for name, module in kept:
                del module.forward
                self._replaced[name] -= Counter([kind])
            self._stayed[kind] += len(kept)
            _log.warning(
                "modules_put_back", parts=kind, backend="transformers", logits_drift=f"{drift:.2g}",
                limit=f"{limit:.2g}",
            )  # fmt: skip

    def _keep_inputs(self) -> None:
        """Let layers keep their inputs if another module reads these after the layer has overwritten them."""
        layers = [layer for layer in self._layers if layer.overwrites]

        def overwrite() -> None:
            for layer in layers:
                layer.keeps_input = False

        for layer in layers:
            layer.keeps_input = True
        if layers and not self._check.same_logits(overwrite):
            for layer in layers:
                layer.keeps_input = True
            _log.info("inputs_not_overwritten", layers=len(layers))


def _is_free(module: nn.Module) -> bool:
    """Return whether the module has no hooks and no replaced forward."""
    return not any((module._forward_hooks, module._forward_pre_hooks, "forward" in module.__dict__))
