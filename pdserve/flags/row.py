"""One flag of vLLM, and what becomes of it here."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class FlagVerdict(StrEnum):
    """What a command that serves does with a flag."""

    SUPPORTED = "supported"
    NO_EFFECT = "no effect"
    REFUSED = "refused"


class Takes(StrEnum):
    """How many words follow a flag; `MAYBE` is true or false, or nothing."""

    NOTHING = "nothing"
    ONE = "one"
    MAYBE = "maybe"
    MANY = "many"


@dataclass(frozen=True, slots=True)
class VllmFlag:
    """A row of the table.

    `why` says why a flag has no effect or is refused. A flag with no effect whose `only` is not empty is refused with
    any other value. A supported flag may be spelled otherwise here: `becomes` is our name, `spelled` makes our value of
    theirs.
    """

    name: str
    verdict: FlagVerdict
    takes: Takes = Takes.ONE
    why: str = ""
    short: str | None = None
    only: tuple[str, ...] = ()
    becomes: str | None = None
    spelled: Callable[[str], str] | None = None

    def takes_value(self, value: str) -> bool:
        """Tell whether a flag without effect may have this value."""
        return not self.only or value.lower() in self.only


def supported(
    name: str, takes: Takes = Takes.ONE, *, short: str | None = None, becomes: str | None = None,
    spelled: Callable[[str], str] | None = None, why: str = "",
) -> VllmFlag:  # fmt: skip
    """Return the row of a flag that does here what it does there."""
    return VllmFlag(name, FlagVerdict.SUPPORTED, takes, why, short, becomes=becomes, spelled=spelled)


def no_effect(
    name: str, why: str, takes: Takes = Takes.ONE, *, only: tuple[str, ...] = (), short: str | None = None
) -> VllmFlag:
    """Return the row of a flag that is taken and does nothing, with the values of `only` alone where it has some."""
    return VllmFlag(name, FlagVerdict.NO_EFFECT, takes, why, short, only)


def refused(name: str, why: str, takes: Takes = Takes.ONE, *, short: str | None = None) -> VllmFlag:
    """Return the row of a flag that cannot be taken: what it asks for would not happen."""
    return VllmFlag(name, FlagVerdict.REFUSED, takes, why, short)
