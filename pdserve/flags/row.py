"""One vLLM flag, and how pdserve treats it."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class FlagVerdict(StrEnum):
    """How a serving command treats a flag."""

    SUPPORTED = "supported"
    NO_EFFECT = "no effect"
    REFUSED = "refused"


class Takes(StrEnum):
    """How many arguments a flag takes; `MAYBE`: an optional true or false."""

    NOTHING = "nothing"
    ONE = "one"
    MAYBE = "maybe"
    MANY = "many"


@dataclass(frozen=True, slots=True)
class VllmFlag:
    """A row of the table.

    `why` is the reason for having no effect or being refused. If `only` is not empty, a flag with no effect is refused
    with any other value. A supported flag may differ here: `becomes` is our name, `spelled` converts vLLM's value to
    ours.
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
        """Return whether this value of a flag without effect is accepted."""
        return not self.only or value.lower() in self.only


def supported(
    name: str, takes: Takes = Takes.ONE, *, short: str | None = None, becomes: str | None = None,
    spelled: Callable[[str], str] | None = None, why: str = "",
) -> VllmFlag:  # fmt: skip
    """Return the row of a flag that does the same as in vLLM."""
    return VllmFlag(name, FlagVerdict.SUPPORTED, takes, why, short, becomes=becomes, spelled=spelled)


def no_effect(
    name: str, why: str, takes: Takes = Takes.ONE, *, only: tuple[str, ...] = (), short: str | None = None
) -> VllmFlag:
    """Return the row of a flag that is accepted without effect, with `only` these values if given."""
    return VllmFlag(name, FlagVerdict.NO_EFFECT, takes, why, short, only)


def refused(name: str, why: str, takes: Takes = Takes.ONE, *, short: str | None = None) -> VllmFlag:
    """Return the row of a flag that is refused because its effect is not available."""
    return VllmFlag(name, FlagVerdict.REFUSED, takes, why, short)
