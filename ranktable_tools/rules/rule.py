"""What a rule is: a code, a sentence, how severe it is, and the function that finds what breaks it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from ranktable_tools.document import Problem
from ranktable_tools.reading import TableReading

Severity = Literal["error", "note"]


@dataclass(frozen=True, slots=True)
class RuleOptions:
    """What is allowed: `share_devices` lets one GPU be in two instances."""

    share_devices: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule over a table that was read; a note does not keep a table from being used, unless asked to."""

    code: str
    says: str
    check: Callable[[TableReading, RuleOptions], Iterable[Problem]]
    severity: Severity = "error"
