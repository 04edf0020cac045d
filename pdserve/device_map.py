"""Which card each rank of an instance computes on: what is shown to this process, and the table's physical ids.

preset by operator or device plugin      obeyed: rank i is the i-th of it
as many cards shown as the entry has     rank i is card i, and the variable is left alone
more cards shown                         the entry's physical ids are looked up and named in the variable
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ranktable_tools.devices.kinds import DeviceKind, present_devices
from ranktable_tools.devices.npu_smi import parse_map
from ranktable_tools.devices.nvidia_smi import GPU_QUERY, parse_gpus
from ranktable_tools.devices.tools import Run, find_tool, run_tool
from wire.errors import ConfigError

VARIABLES: Final[Mapping[DeviceKind, str]] = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}


@dataclass(frozen=True, slots=True)
class Card:
    """One card that this process could use: its physical id, and what names it in the variable."""

    device_id: str
    name: str


@dataclass(frozen=True, slots=True)
class DeviceMap:
    """What the variable is to be, None to leave it as it is, and the line that says which rank has which card."""

    variable: str
    value: str | None
    line: str


def map_devices(
    kind: DeviceKind, device_ids: Sequence[str], environ: Mapping[str, str], *,
    run: Run = run_tool, dev: Path = Path("/dev"),
) -> DeviceMap | None:  # fmt: skip
    """Return the map of an instance's ranks, None on CPUs.

    Raises ConfigError with both numbers where there are fewer cards than ranks, and RanktableError where a driver's
    tool does not answer.
    """
    variable = VARIABLES.get(kind)
    if variable is None:
        return None
    preset = environ.get(variable)
    if preset is not None:
        return _obeyed(variable, preset, device_ids)
    cards = _FINDERS[kind](environ, run, dev)
    if len(cards) < len(device_ids):
        raise ConfigError(
            f"{len(cards)} {kind} cards are shown here ({_listed(cards)}), the table's entry has {len(device_ids)} "
            f"({','.join(device_ids)}): start the container with all of them"
        )
    if len(cards) == len(device_ids):
        line = _line(device_ids, [f"card {rank}" for rank in range(len(cards))])
        return DeviceMap(variable, None, f"{line} (every card shown here; {variable} is left unset)")
    named = {card.device_id: card.name for card in cards}
    absent = [device_id for device_id in device_ids if device_id not in named]
    if absent:
        raise ConfigError(
            f"device {absent[0]} of the table is none of the {kind} cards shown here ({_listed(cards)}): start it "
            f"where the device is, show the entry's cards alone, or set {variable}"
        )
    if not all(named.values()):
        raise ConfigError(f"nvidia-smi does not say which of the cards {_listed(cards)} is which: set {variable}")
    value = ",".join(named[device_id] for device_id in device_ids)
    return DeviceMap(variable, value, f"{_line(device_ids, value.split(','))} ({variable}={value})")


def _obeyed(variable: str, preset: str, device_ids: Sequence[str]) -> DeviceMap:
    names = [name.strip() for name in preset.split(",") if name.strip()]
    if len(names) < len(device_ids):
        raise ConfigError(
            f"{variable}={preset!r} shows {len(names)} cards, the table's entry has {len(device_ids)} "
            f"({','.join(device_ids)}): name them all in it, or unset it"
        )
    return DeviceMap(variable, None, f"{_line(device_ids, names)} ({variable}={preset}, as it was set)")


def _npus(environ: Mapping[str, str], run: Run, dev: Path) -> list[Card]:
    """Return the NPUs by npu-smi, else by their nodes. The runtime counts what it is shown from 0, by physical id."""
    tool = find_tool("npu-smi", environ)
    shown = {chip.device_id for chip in parse_map(run((tool, "info", "-m")).text)} if tool is not None else set()
    ids = sorted(shown or present_devices("npu", dev), key=int)
    return [Card(device_id, str(place)) for place, device_id in enumerate(ids)]


def _gpus(environ: Mapping[str, str], run: Run, dev: Path) -> list[Card]:
    """Return the GPUs by nvidia-smi, named by UUID: CUDA's own order of them is another.

    Where it says nothing they are counted by their nodes, whose numbers name no card for sure.
    """
    tool = find_tool("nvidia-smi", environ)
    gpus = parse_gpus(run((tool, *GPU_QUERY)).text) if tool is not None else []
    if gpus:
        return [Card(gpu.device_id, gpu.uuid) for gpu in gpus]
    return [Card(device_id, "") for device_id in present_devices("cuda", dev)]


_FINDERS: Final[Mapping[DeviceKind, Callable[[Mapping[str, str], Run, Path], list[Card]]]] = {
    "npu": _npus, "cuda": _gpus,
}  # fmt: skip


def _line(device_ids: Sequence[str], names: Sequence[str]) -> str:
    pairs = (f"rank {rank} = device {device_id} on {name}" for rank, (device_id, name) in
             enumerate(zip(device_ids, names, strict=False)))  # fmt: skip
    return "devices: " + ", ".join(pairs)


def _listed(cards: Sequence[Card]) -> str:
    return ",".join(card.device_id for card in cards) or "none"
