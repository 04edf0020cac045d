"""The device kinds by name, and the choice of --device auto. Imports no torch.

auto: the first kind of AUTO_ORDER that has a card on this machine and can be used; the CPU always can.
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
"""The value of --device that lets pdserve choose."""
AUTO_ORDER = ("npu", "cuda", "cpu")


def traits_of(device: str) -> Traits:
    """Return the traits of a device by its name, such as "npu:0". Raises ConfigError."""
    return find_kind(device.partition(":")[0]).traits


def open_device(name: str) -> Device:
    """Open a device by its name, such as "npu:0". Raises ConfigError if it cannot be used."""
    kind, _, index = name.partition(":")
    return find_kind(kind).open(int(index or 0))


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """The chosen kind, and the reason in one line for the log."""

    kind: DeviceKind
    reason: str


def find_kind(name: str, kinds: Mapping[str, DeviceKind] | None = None) -> DeviceKind:
    """Return the kind of this name. Raises ConfigError."""
    known = KINDS if kinds is None else kinds
    found = known.get(name)
    if found is None:
        raise ConfigError(f"--device {name!r} is not one of {AUTO}, {', '.join(known)}")
    return found


def choose(requested: str, kinds: Mapping[str, DeviceKind] | None = None) -> DeviceChoice:
    """Resolve --device. Imports torch if a card is visible or a kind is named. Raises ConfigError.

    A named kind that cannot be used is an error; with `auto` it is skipped, and the reason explains why.
    """
    known = KINDS if kinds is None else kinds
    if requested != AUTO:
        kind = find_kind(requested, known)
        lacking = kind.lacking()
        if lacking is not None:
            raise ConfigError(f"--device {requested}: {lacking}")
        return DeviceChoice(kind, f"device {requested}, as requested")
    skipped = []
    for name in AUTO_ORDER:
        kind = known[name]
        if not kind.sees_card():
            skipped.append(f"no {name} card is visible here")
            continue
        lacking = kind.lacking()
        if lacking is None:
            return DeviceChoice(kind, f"device {name}: {'; '.join(skipped) or 'a card is visible here'}")
        skipped.append(f"{name} cannot be used: {lacking}")
    raise ConfigError(f"no device can be used: {'; '.join(skipped)}")
