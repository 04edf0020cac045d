"""The devices at the two ends of verify's KV hop: every pair that this machine can form, or the requested one."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from devices.interface import DeviceKind
from devices.table import KINDS, choose
from wire.errors import ConfigError

EACH = "each"


@dataclass(frozen=True, slots=True)
class DeviceKindPair:
    """The device kinds of P and D."""

    prefill: str = "cpu"
    decode: str = "cpu"

    def __str__(self) -> str:
        return f"{self.prefill} -> {self.decode}"

    @property
    def is_alike(self) -> bool:
        """Whether both are of one kind."""
        return self.prefill == self.decode


@dataclass(frozen=True, slots=True)
class DevicePairs:
    """The pairs to verify, and the reason for each kind that is in no pair."""

    pairs: tuple[DeviceKindPair, ...]
    lacking: Mapping[str, str]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The distinct kinds at either end."""
        return tuple(dict.fromkeys(kind for pair in self.pairs for kind in (pair.prefill, pair.decode)))

    def describe(self) -> str:
        """Return a line that lists the pairs, and the reasons why there are no others."""
        listed, reasons = ", ".join(map(str, self.pairs)), "; ".join(self.lacking.values())
        if not reasons:
            return f"devices: {listed}"
        if len(self.pairs) == 1:
            return f"devices: {listed}, the only pair that this machine can form: {reasons}"
        return f"devices: {listed}; no others: {reasons}"


def choose_pairs(requested: str, kinds: Mapping[str, DeviceKind] | None = None) -> DevicePairs:
    """Return every pair of usable kinds, or the requested one: KIND for both ends, or P:D.

    Imports torch if a card is visible or a kind is requested. Raises ConfigError for an unusable kind.
    """
    known = KINDS if kinds is None else kinds
    if requested == EACH:
        lacking = {name: why for name, kind in known.items() if (why := _why_not(name, kind)) is not None}
        usable = [name for name in known if name not in lacking]
        return DevicePairs(tuple(DeviceKindPair(*ends) for ends in product(usable, repeat=2)), lacking)
    ends = requested.split(":")
    if len(ends) > 2:
        raise ConfigError(f"--device {requested!r} names {len(ends)} ends: a pair is P:D, such as cpu:{[*known][-1]}")
    settled = [choose(end, known).kind.traits.kind for end in ends]
    return DevicePairs((DeviceKindPair(settled[0], settled[-1]),), {})


def _why_not(name: str, kind: DeviceKind) -> str | None:
    if not kind.sees_card():
        return f"no {name} card is visible here"
    lacking = kind.lacking()
    return None if lacking is None else f"{name} cannot be used: {lacking}"
