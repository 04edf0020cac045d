"""The roles of a network's modules and parameters in tensor parallelism.

They are those of transformers' plan or, if there is none, those of the model families (engine/models/families.py).
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from engine.models.families import support_of
from engine.models.sharding_roles import FUSED_GATE_UP, FUSED_QKV, KNOWN, ROW
from wire.errors import ConfigError

_LAYER = r"(?:.*\.)?layers\.\d+\."


def find_roles(network: Any, kind: str) -> dict[str, str]:
    """Return the roles of modules and parameters by their paths. Raises ConfigError for unknown roles."""
    names = [name for name, _ in network.named_modules()] + [name for name, _ in network.named_parameters()]
    theirs: dict[str, str] = getattr(network, "tp_plan", None) or {}
    roles = _match(names, {re.escape(key).replace(r"\*", r"[^.]+"): role for key, role in theirs.items()})
    roles |= _match(names, {_LAYER + re.escape(key): role for key, role in support_of(kind).sharding.items()})
    roles |= {name: role for path, module in network.named_modules() for name, role in _fused(path, module, roles)}
    head = network.get_output_embeddings()
    heads = {name for name, module in network.named_modules() if module is head}
    for name, role in roles.items():
        if role not in KNOWN and name not in heads:
            raise ConfigError(
                f"{kind} cannot be split over several ranks: its tensor-parallel plan has {name} as {role}, which "
                f"is not one of {', '.join(KNOWN)}; use --tensor-parallel-size 1"
            )
    return roles


def _match(names: list[str], plan: Mapping[str, str]) -> dict[str, str]:
    patterns = [(re.compile(pattern + "$"), role) for pattern, role in plan.items()]
    return {name: role for name in names for pattern, role in patterns if pattern.match(name)}


def _fused(path: str, module: Any, roles: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the roles of fused projections, which the plan does not cut."""
    for fused, last, role in (("qkv_proj", "o_proj", FUSED_QKV), ("gate_up_proj", "down_proj", FUSED_GATE_UP)):
        names = f"{path}.{fused}", f"{path}.{last}"
        linears = all(isinstance(getattr(module, name, None), nn.Linear) for name in (fused, last))
        if linears and [roles.get(name) for name in names] == ["colwise_gather_output", "rowwise_split_input"]:
            yield names[0], role
            yield names[1], ROW
