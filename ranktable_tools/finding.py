"""Findings of lint, one per mistake, as a line and as JSON."""

import json
from dataclasses import dataclass

from ranktable_tools.document import Problem, shown
from ranktable_tools.errors import RanktableError
from ranktable_tools.rules.rule import Severity

_MAX_VALUE = 1000


@dataclass(frozen=True, slots=True)
class Finding:
    """One mistake in a file: the rule, the JSON path, the value, what is wrong with it, and what to write instead."""

    file: str
    severity: Severity
    code: str
    json_path: str
    value: object
    message: str
    instead: str

    def __str__(self) -> str:
        note = "note: " if self.severity == "note" else ""
        instead = f"; {self.instead}" if self.instead else ""
        return f"{_file_name(self.file)}: {note}{self.message}{instead} [{self.code}]"

    def as_json(self) -> dict[str, object]:
        """Return the finding as `--format json` prints it; a value over 1,000 characters is truncated to a string."""
        return {
            "file": self.file,
            "severity": self.severity,
            "code": self.code,
            "path": self.json_path,
            "value": self.value if len(json.dumps(self.value)) <= _MAX_VALUE else shown(self.value),
            "message": self.message,
            "instead": self.instead,
        }


def of_problem(file: str, problem: Problem, severity: Severity = "error") -> Finding:
    """Return the finding of a problem in a document."""
    message = f"{problem.json_path} {problem.found}"
    return Finding(file, severity, problem.code, problem.json_path, problem.value, message, problem.advice)


def of_error(file: str, error: RanktableError) -> Finding:
    """Return the finding of an error; the text after its first semicolon is the advice."""
    message, _, instead = str(error).removeprefix(f"{_file_name(file)}: ").partition("; ")
    return Finding(file, "error", error.code, error.json_path, error.value, message, instead)


def _file_name(file: str) -> str:
    return file or "''"
