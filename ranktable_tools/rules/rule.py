"""The definition of a rule: a code, a description, a severity, and the function that finds violations."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from ranktable_tools.document import Problem
from ranktable_tools.reading import TableReading

Severity = Literal["error", "note"]


@dataclass(frozen=True, slots=True)
class RuleOptions:
    """What is allowed: `share_devices` allows two instances to use one GPU."""

    share_devices: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule over a table that was read; a note does not make a table unusable, except with lint --strict."""

    code: str
    description: str
    check: Callable[[TableReading, RuleOptions], Iterable[Problem]]
    severity: Severity = "error"
