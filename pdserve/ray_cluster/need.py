"""What one instance needs of a Ray node, in Ray's resources, and what is said where no node has it. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ranktable_tools.devices.kinds import DeviceKind, kind_named

STRATEGIES: Final = ("spread", "pack", "strict-spread", "strict-pack")
"""How instances lie on nodes: apart or together, as far as there is room, or (strict) not at all."""

RESOURCES: Final[Mapping[DeviceKind, str]] = {"npu": "NPU", "cuda": "GPU", "cpu": "CPU"}
"""What Ray calls each kind of device."""


@dataclass(frozen=True, slots=True)
class Need:
    """One instance's bundle: `num_ranks` devices of one kind, all on one node."""

    kind: DeviceKind
    num_ranks: int

    @property
    def resource(self) -> str:
        """What Ray calls the device: NPU, GPU or CPU."""
        return RESOURCES[self.kind]

    @property
    def bundle(self) -> dict[str, float]:
        """Return the bundle of its placement group."""
        return {self.resource: float(self.num_ranks)}

    def __str__(self) -> str:
        return f"{self.num_ranks} {self.resource}"


def need_of(device: str, num_ranks: int) -> Need:
    """Return what an instance with `--device` and that many ranks needs; auto is the CPU, as on one machine."""
    return Need(kind_named(device), num_ranks)


def no_room(
    need: Need, num_instances: int, strategy: str, nodes: Sequence[Mapping[str, float]], waited_s: float
) -> str:
    """Return the sentence for a cluster whose `nodes` (resources of each) did not take the instances in time."""
    having = [f"{node[need.resource]:g}" for node in nodes if node.get(need.resource)]
    return (
        f"the Ray cluster had no room for {num_instances} instances of {need} each ({strategy}) within {waited_s:g} s: "
        f"it has {len(nodes)} nodes, with {need.resource} {', '.join(having) or 'on none'} (used ones included)"
    )
