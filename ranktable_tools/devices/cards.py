"""The cards that this process is shown, by their drivers' tools: physical ids, and what names each to a process.

kind   asked       named by
npu    npu-smi     its place: the runtime counts what it is shown from 0, by physical id
cuda   nvidia-smi  its UUID: CUDA's own order is another than the driver's
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
    """One card that this process could use: its physical id, and what names it in the variable that shows cards."""

    device_id: str
    name: str


def shown_cards(
    kind: DeviceKind, environ: Mapping[str, str], run: Run = run_tool, dev: Path = Path("/dev")
) -> list[Card]:
    """Return them in order, none for `cpu`. A name is empty where nothing tells it.

    Raises RanktableError where a driver's tool does not answer.
    """
    finder = _FINDERS.get(kind)
    return [] if finder is None else finder(environ, run, dev)


def _npus(environ: Mapping[str, str], run: Run, dev: Path) -> list[Card]:
    tool = find_tool("npu-smi", environ)
    shown = {chip.device_id for chip in parse_map(run((tool, "info", "-m")).text)} if tool is not None else set()
    ids = sorted(shown or present_devices("npu", dev), key=int)
    return [Card(device_id, str(place)) for place, device_id in enumerate(ids)]


def _gpus(environ: Mapping[str, str], run: Run, dev: Path) -> list[Card]:
    """Where nvidia-smi says nothing they are counted by their nodes, whose numbers name no card for sure."""
    tool = find_tool("nvidia-smi", environ)
    gpus = parse_gpus(run((tool, *GPU_QUERY)).text) if tool is not None else []
    if gpus:
        return [Card(gpu.device_id, gpu.uuid) for gpu in gpus]
    return [Card(device_id, "") for device_id in present_devices("cuda", dev)]


_FINDERS: Mapping[DeviceKind, Callable[[Mapping[str, str], Run, Path], list[Card]]] = {"npu": _npus, "cuda": _gpus}
