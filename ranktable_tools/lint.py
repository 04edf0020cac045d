"""Find every mistake in table files, in each file and across files."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ranktable_tools.any_file import ReadFile, open_table
from ranktable_tools.dialects import modelarts
from ranktable_tools.dialects.dialect import ReadOptions
from ranktable_tools.errors import RanktableError
from ranktable_tools.finding import Finding, of_error, of_problem
from ranktable_tools.keys import misspelt_keys
from ranktable_tools.lint_across import lint_across
from ranktable_tools.rules.catalogue import LINT_RULES, broken
from ranktable_tools.rules.rule import RuleOptions


@dataclass(frozen=True, slots=True)
class LintOptions:
    """Options of lint. `dialect` None: detected. `share_devices`: instances may share a GPU.

    `node_ports` is the scheduler's NODE_PORTS, None: not checked. `strict`: notes count as errors. `part` accepts one
    host's table that is not merged yet, in which groups are missing.
    """

    dialect: str | None = None
    share_devices: bool = False
    node_ports: str | None = None
    strict: bool = False
    part: bool = False
    read: ReadOptions = ReadOptions()  # noqa: RUF009 - frozen


def lint(paths: Sequence[str], options: LintOptions = LintOptions()) -> list[Finding]:
    """Return every mistake, each naming file, place, value and fix; empty if there is none."""
    findings: list[Finding] = []
    clean: list[ReadFile] = []
    for path in paths:
        try:
            opened = open_table(path, options.dialect, options.read)
        except RanktableError as error:
            findings.append(of_error(path, error))
            continue
        found = list(_lint_one(opened, options))
        if not any(finding.severity == "error" for finding in found):
            clean.append(opened)
        findings += found
    findings += lint_across(clean, options.node_ports)
    return [replace(finding, severity="error") for finding in findings] if options.strict else findings


def _lint_one(opened: ReadFile, options: LintOptions) -> Iterator[Finding]:
    if opened.dialect is modelarts.DIALECT and opened.reading.kind == "cluster" and not options.part:
        modelarts.check_whole(opened.document)
    yield from (of_problem(opened.path, problem) for problem in opened.problems)
    yield from (of_problem(opened.path, problem, "note") for problem in misspelt_keys(opened.document.value))
    for severity, problem in broken(opened.reading, RuleOptions(options.share_devices), opened.problems, LINT_RULES):
        yield of_problem(opened.path, problem, severity)
