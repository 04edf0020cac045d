"""The cards visible to this process, from their drivers' tools: physical ids, and the names that select them.

kind   tool        name
npu    npu-smi     its index: the runtime numbers visible cards from 0, in the order of physical ids
cuda   nvidia-smi  its UUID: CUDA's order differs from the driver's
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ranktable_tools.devices.kinds import DeviceKind, present_devices
from ranktable_tools.devices.npu_smi import parse_map
from ranktable_tools.devices.nvidia_smi import GPU_QUERY, parse_gpus
from ranktable_tools.devices.tools import Run, find_tool, run_tool


@dataclass(frozen=True, slots=True)
class Card:
    """One card that this process could use: its physical id, and its name in the variable of visible devices."""

    device_id: str
    name: str


def shown_cards(
    kind: DeviceKind, environ: Mapping[str, str], run: Run = run_tool, dev: Path = Path("/dev")
) -> list[Card]:
    """Return the visible cards in order, none for `cpu`. A name is empty if it is unknown.

    Raises RanktableError if a driver's tool does not respond.
    """
    finder = _FINDERS.get(kind)
    return [] if finder is None else finder(environ, run, dev)


def _list_npus(environ: Mapping[str, str], run: Run, dev: Path) -> list[Card]:
    tool = find_tool("npu-smi", environ)
    shown = {chip.device_id for chip in parse_map(run((tool, "info", "-m")).text)} if tool is not None else set()
    ids = sorted(shown or present_devices("npu", dev), key=int)
    return [Card(device_id, str(place)) for place, device_id in enumerate(ids)]


def _list_gpus(environ: Mapping[str, str], run: Run, dev: Path) -> list[Card]:
    """Without output from nvidia-smi, list GPUs by their nodes, without names: node numbers may not match CUDA's."""
    tool = find_tool("nvidia-smi", environ)
    gpus = parse_gpus(run((tool, *GPU_QUERY)).text) if tool is not None else []
    if gpus:
        return [Card(gpu.device_id, gpu.uuid) for gpu in gpus]
    return [Card(device_id, "") for device_id in present_devices("cuda", dev)]


_FINDERS: Mapping[DeviceKind, Callable[[Mapping[str, str], Run, Path], list[Card]]] = {
    "npu": _list_npus,
    "cuda": _list_gpus,
}
