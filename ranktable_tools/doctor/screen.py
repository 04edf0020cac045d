"""Format findings as one screen of text with next steps, or as one JSON object."""

import json
from collections import Counter
from collections.abc import Sequence

from ranktable_tools.doctor.verdict import CheckResult, Result, worst

_MARKS: dict[Result, str] = {"ok": "ok", "warn": "warn", "fail": "FAIL", "not here": "-"}
_COLOURS: dict[Result, str] = {"ok": "32", "warn": "33", "fail": "31", "not here": "2"}
_SUMMARY: dict[Result, str] = {"fail": "to fix", "warn": "to check", "ok": "ok", "not here": "not here"}


def text_lines(title: str, findings: Sequence[CheckResult], *, colour: bool = False) -> list[str]:
    """Return the lines of the screen; a finding's next step follows below it, after an arrow."""
    width = max((len(finding.name) for finding in findings), default=0)
    lines = [_printable(title)]
    for finding in findings:
        verdict = finding.verdict
        mark = _MARKS[verdict.result].ljust(4)
        shown = f"\x1b[{_COLOURS[verdict.result]}m{mark}\x1b[0m" if colour else mark
        lines.append(f"{shown}  {finding.name.ljust(width)}  {_printable(verdict.message)}")
        if verdict.next_step:
            lines.append(f"{' ' * (width + 8)}-> {_printable(verdict.next_step)}")
    return [*lines, _summary_counts(findings)]


def json_text(title: str, findings: Sequence[CheckResult]) -> str:
    """Return the findings as one JSON object."""
    listed = [
        {
            "name": finding.name,
            "result": finding.verdict.result,
            "words": finding.verdict.message,
            "next_step": finding.verdict.next_step,
        }
        for finding in findings
    ]
    result = worst([finding.verdict.result for finding in findings])
    return json.dumps({"title": title, "result": result, "findings": listed}, indent=2)


def _summary_counts(findings: Sequence[CheckResult]) -> str:
    counts = Counter(finding.verdict.result for finding in findings)
    return ", ".join(f"{counts[result]} {message}" for result, message in _SUMMARY.items() if counts[result])


def _printable(text: str) -> str:
    """Return `text` without control characters: it contains output of tools and peers."""
    return "".join(char if char.isprintable() else "?" for char in text)
