"""Which devices the two ends of verify's hop run on: every pair that this machine can form, or the one asked for."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from devices.interface import DeviceKind
from devices.table import KINDS, choose
from wire.errors import ConfigError

EACH = "each"


@dataclass(frozen=True, slots=True)
class DeviceKindPair:
    """The kinds of device that P and D run on."""

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
    """The pairs to verify, and in words why other kinds are in none of them."""

    pairs: tuple[DeviceKindPair, ...]
    lacking: Mapping[str, str]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Every kind that one of the ends has, once."""
        return tuple(dict.fromkeys(kind for pair in self.pairs for kind in (pair.prefill, pair.decode)))

    def describe(self) -> str:
        """Return the line that says which there are, and why there are no others."""
        listed, reasons = ", ".join(map(str, self.pairs)), "; ".join(self.lacking.values())
        if not reasons:
            return f"devices: {listed}"
        if len(self.pairs) == 1:
            return f"devices: {listed}, the only pair that this machine can form: {reasons}"
        return f"devices: {listed}; no others: {reasons}"


def choose_pairs(asked: str, kinds: Mapping[str, DeviceKind] | None = None) -> DevicePairs:
    """Return every pair of the kinds that can be used here, or the one asked for: KIND for both ends, or P:D.

    Imports torch where a card is shown or a kind is asked for. Raises ConfigError for a kind that cannot be used.
    """
    known = KINDS if kinds is None else kinds
    if asked == EACH:
        lacking = {name: why for name, kind in known.items() if (why := _why_not(name, kind)) is not None}
        usable = [name for name in known if name not in lacking]
        return DevicePairs(tuple(DeviceKindPair(*ends) for ends in product(usable, repeat=2)), lacking)
    ends = asked.split(":")
    if len(ends) > 2:
        raise ConfigError(f"--device {asked!r} names {len(ends)} ends: a pair is P:D, as cpu:{[*known][-1]}")
    settled = [choose(end, known).kind.traits.kind for end in ends]
    return DevicePairs((DeviceKindPair(settled[0], settled[-1]),), {})


def _why_not(name: str, kind: DeviceKind) -> str | None:
    if not kind.sees_card():
        return f"no {name} card is shown here"
    lacking = kind.lacking()
    return None if lacking is None else f"{name} cannot be used: {lacking}"
