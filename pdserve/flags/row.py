"""One vLLM flag, and how pdserve treats it."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class FlagVerdict(StrEnum):
    """How a serving command treats a flag."""

    SUPPORTED = "supported"
    NO_EFFECT = "no effect"
    REFUSED = "refused"


class Arity(StrEnum):
    """How many arguments a flag takes; `MAYBE`: an optional true or false."""

    NOTHING = "nothing"
    ONE = "one"
    MAYBE = "maybe"
    MANY = "many"


@dataclass(frozen=True, slots=True)
class VllmFlag:
    """A row of the table.

    `why` is the reason for having no effect or being refused. If `only` is not empty, a flag with no effect is refused
    with any other value. A supported flag may differ here: `our_name` is our name, `convert` converts vLLM's value to
    ours.
    """

    name: str
    verdict: FlagVerdict
    arity: Arity = Arity.ONE
    why: str = ""
    short: str | None = None
    only: tuple[str, ...] = ()
    our_name: str | None = None
    convert: Callable[[str], str] | None = None

    def accepts_value(self, value: str) -> bool:
        """Return whether this value of a flag without effect is accepted."""
        return not self.only or value.lower() in self.only


def supported(
    name: str, arity: Arity = Arity.ONE, *, short: str | None = None, our_name: str | None = None,
    convert: Callable[[str], str] | None = None, why: str = "",
) -> VllmFlag:  # fmt: skip
    """Return the row of a flag that does the same as in vLLM."""
    return VllmFlag(name, FlagVerdict.SUPPORTED, arity, why, short, our_name=our_name, convert=convert)


def no_effect(
    name: str, why: str, arity: Arity = Arity.ONE, *, only: tuple[str, ...] = (), short: str | None = None
) -> VllmFlag:
    """Return the row of a flag that is accepted without effect; if `only` is given, only with one of its values."""
    return VllmFlag(name, FlagVerdict.NO_EFFECT, arity, why, short, only)


def refused(name: str, why: str, arity: Arity = Arity.ONE, *, short: str | None = None) -> VllmFlag:
    """Return the row of a flag that is refused because its effect is not available."""
    return VllmFlag(name, FlagVerdict.REFUSED, arity, why, short)
