"""The kinds of devices by name, and what --device auto means. Imports no torch.

auto: the first of AUTO_ORDER that this machine shows a card of and that can be used; the CPU can always be.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from devices.cpu import CpuKind
from devices.cuda import CudaKind
from devices.interface import Device, DeviceKind, Traits
from devices.npu import NpuKind
from wire.errors import ConfigError

KINDS: dict[str, DeviceKind] = {"cpu": CpuKind(), "cuda": CudaKind(), "npu": NpuKind()}
AUTO = "auto"
"""The word of --device that leaves the choice to us."""
AUTO_ORDER = ("npu", "cuda", "cpu")


def traits_of(device: str) -> Traits:
    """Return the traits behind a device's name, as "npu:0". Raises ConfigError."""
    return find_kind(device.partition(":")[0]).traits


def open_device(name: str) -> Device:
    """Open a device by its name, as "npu:0". Raises ConfigError where it cannot be used."""
    kind, _, index = name.partition(":")
    return find_kind(kind).open(int(index or 0))


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """The kind that was settled on, and why, in a line for people."""

    kind: DeviceKind
    reason: str


def find_kind(name: str, kinds: Mapping[str, DeviceKind] | None = None) -> DeviceKind:
    """Return the kind of this name. Raises ConfigError."""
    known = KINDS if kinds is None else kinds
    found = known.get(name)
    if found is None:
        raise ConfigError(f"--device {name!r} is not one of {AUTO}, {', '.join(known)}")
    return found


def choose(asked: str, kinds: Mapping[str, DeviceKind] | None = None) -> DeviceChoice:
    """Settle --device. Imports torch where a card is shown or a kind is asked for. Raises ConfigError.

    A kind asked for by name that cannot be used is an error; under `auto` it is passed over, and the reason says so.
    """
    known = KINDS if kinds is None else kinds
    if asked != AUTO:
        kind = find_kind(asked, known)
        lacking = kind.lacking()
        if lacking is not None:
            raise ConfigError(f"--device {asked}: {lacking}")
        return DeviceChoice(kind, f"device {asked}, as asked")
    passed_over = []
    for name in AUTO_ORDER:
        kind = known[name]
        if not kind.sees_card():
            passed_over.append(f"no {name} card is shown here")
            continue
        lacking = kind.lacking()
        if lacking is None:
            return DeviceChoice(kind, f"device {name}: {'; '.join(passed_over) or 'a card is shown here'}")
        passed_over.append(f"{name} cannot be used: {lacking}")
    raise ConfigError(f"no device can be used: {'; '.join(passed_over)}")
