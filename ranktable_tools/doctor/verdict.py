"""The verdict of a check: a result, its description, and the next step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Result = Literal["ok", "warn", "fail", "not here"]
_BY_WEIGHT: tuple[Result, ...] = ("fail", "warn", "ok", "not here")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one check; `next_step` is empty if there is nothing to do."""

    result: Result
    message: str
    next_step: str = ""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """A check's name and its verdict."""

    name: str
    verdict: Verdict


def ok(message: str) -> Verdict:
    """Return the verdict for a check that passed."""
    return Verdict("ok", message)


def warn(message: str, next_step: str) -> Verdict:
    """Return the verdict for something that works, or may work, but should be changed."""
    return Verdict("warn", message, next_step)


def fail(message: str, next_step: str) -> Verdict:
    """Return the verdict for something that does not work until it is fixed."""
    return Verdict("fail", message, next_step)


def not_here(message: str, next_step: str = "") -> Verdict:
    """Return the verdict for a check with nothing to check on this machine, or not yet."""
    return Verdict("not here", message, next_step)


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return "1 card" or "2 cards"."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def worst(results: Sequence[Result]) -> Result:
    """Return the worst of these results; `ok` for none."""
    return min(results, key=_BY_WEIGHT.index, default="ok")


def combined(problems: Sequence[Verdict], good: str) -> Verdict:
    """Return one verdict for all problems, worst first; `ok` with the text `good` if there is none."""
    if not problems:
        return ok(good)
    ordered = sorted(problems, key=lambda verdict: _BY_WEIGHT.index(verdict.result))
    steps = dict.fromkeys(verdict.next_step for verdict in ordered if verdict.next_step)
    message = "; ".join(dict.fromkeys(verdict.message for verdict in ordered))
    return Verdict(ordered[0].result, message, "; ".join(steps))
