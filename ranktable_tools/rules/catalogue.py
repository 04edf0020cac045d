"""All rules for a table that has been read: TABLE_RULES are always checked; only lint checks the other LINT_RULES."""

from collections.abc import Iterator, Sequence

from ranktable_tools.document import Problem
from ranktable_tools.reading import TableReading
from ranktable_tools.rules.devices import DEVICE_RULES
from ranktable_tools.rules.hccl import HCCL_RULES
from ranktable_tools.rules.rule import Rule, RuleOptions, Severity
from ranktable_tools.rules.servers import SERVER_RULES
from ranktable_tools.rules.workers import WORKER_RULES

TABLE_RULES: tuple[Rule, ...] = (*DEVICE_RULES, *SERVER_RULES, *HCCL_RULES)
LINT_RULES: tuple[Rule, ...] = (*TABLE_RULES, *WORKER_RULES)


def broken(
    reading: TableReading, options: RuleOptions, known: Sequence[Problem] = (), rules: Sequence[Rule] = TABLE_RULES
) -> Iterator[tuple[Severity, Problem]]:
    """Yield each problem of a table that was read, with its severity.

    `known` are the problems found while reading. If there are any, notes are omitted, and so are problems at the same
    place or around it, which are only consequences.
    """
    for rule in rules:
        for problem in rule.check(reading, options):
            if not known or (rule.severity == "error" and not any(_is_consequence(problem, other) for other in known)):
                yield rule.severity, problem


def errors(reading: TableReading, options: RuleOptions = RuleOptions(), known: Sequence[Problem] = ()) -> list[Problem]:
    """Return the errors that make a table unusable, other than those found while reading."""
    return [problem for severity, problem in broken(reading, options, known) if severity == "error"]


def _is_consequence(problem: Problem, known: Problem) -> bool:
    longer, shorter = (
        (problem.json_path, known.json_path)
        if len(problem.json_path) > len(known.json_path)
        else (known.json_path, problem.json_path)
    )
    return longer.startswith(shorter) and longer[len(shorter) : len(shorter) + 1] in ("", ".", "[")
