"""What one instance needs from a Ray node, in Ray's resources, and the error if no node has it. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from devices.table import traits_of
from ranktable_tools.devices.kinds import KINDS, DeviceKind, kind_named

STRATEGIES: Final = ("spread", "pack", "strict-spread", "strict-pack")
"""How to place instances on nodes: spread or packed, as far as possible or (strict) always."""

RESOURCES: Final[Mapping[DeviceKind, str]] = {name: traits_of(name).ray_resource for name in KINDS}
"""Ray's resource name of each device kind."""


@dataclass(frozen=True, slots=True)
class Need:
    """One instance's bundle: `num_ranks` devices of one kind, all on one node."""

    kind: DeviceKind
    num_ranks: int

    @property
    def resource(self) -> str:
        """Ray's resource name: NPU, GPU or CPU."""
        return RESOURCES[self.kind]

    @property
    def bundle(self) -> dict[str, float]:
        """The bundle for the placement group."""
        return {self.resource: float(self.num_ranks)}

    def __str__(self) -> str:
        return f"{self.num_ranks} {self.resource}"


def need_of(device: str, num_ranks: int) -> Need:
    """Return the need of an instance with `--device` and `num_ranks` ranks; auto means the CPU."""
    return Need(kind_named(device), num_ranks)


def no_room(
    need: Need, num_instances: int, strategy: str, nodes: Sequence[Mapping[str, float]], waited_s: float
) -> str:
    """Return the error message for a cluster whose `nodes` (resources of each) had no room in time."""
    counts = ", ".join(f"{node[need.resource]:g}" for node in nodes if node.get(need.resource))
    having = f"{need.resource} {counts} (including those in use)" if counts else f"no {need.resource} on any"
    return (
        f"the Ray cluster had no room for {num_instances} instances of {need} each ({strategy}) within {waited_s:g} s: "
        f"it has {len(nodes)} node{'' if len(nodes) == 1 else 's'}, with {having}"
    )
