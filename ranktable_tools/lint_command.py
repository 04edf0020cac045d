"""`ranktable lint`: list every mistake in some tables, as lines or as JSON."""

import argparse
import json
from collections.abc import Sequence

from ranktable_tools.arguments import OneLineParser, add_command, add_dialect, add_read_options, read_options
from ranktable_tools.finding import Finding
from ranktable_tools.lint import LintOptions, lint

_MAX_LINES = 200


def add(commands: "argparse._SubParsersAction[OneLineParser]") -> None:
    """Add the subcommand."""
    parser = add_command(commands, "lint", "List every mistake in these tables.")
    parser.add_argument("files", nargs="+", metavar="FILE", help="global and local tables, compared with each other")
    add_dialect(parser)
    add_read_options(parser)
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text, a line per mistake")
    parser.add_argument("--strict", action="store_true", help="notes, e.g. unequal tensor-parallel sizes, are errors")
    parser.add_argument("--part", action="store_true", help="accept the table of one host, not yet merged")
    parser.add_argument("--share-devices", action="store_true", help="let two instances share one GPU")
    parser.add_argument("--node-ports", metavar="P,P", help="the scheduler's NODE_PORTS, checked against the table")
    parser.set_defaults(command=_run_lint)


def _run_lint(arguments: argparse.Namespace) -> int:
    options = LintOptions(
        arguments.dialect, arguments.share_devices, arguments.node_ports, arguments.strict, arguments.part,
        read_options(arguments),
    )  # fmt: skip
    findings = lint(arguments.files, options)
    num_wrong = sum(finding.severity == "error" for finding in findings)
    if arguments.format == "json":
        print(_json(arguments.files, findings))
    else:
        print("\n".join(_lines(findings, len(arguments.files), num_wrong)))
    return 2 if num_wrong else 0


def _json(files: Sequence[str], findings: Sequence[Finding]) -> str:
    return json.dumps({"files": files, "findings": [finding.as_json() for finding in findings]}, indent=2)


def _lines(findings: Sequence[Finding], num_files: int, num_wrong: int) -> list[str]:
    lines = [str(finding) for finding in findings[:_MAX_LINES]]
    if len(findings) > _MAX_LINES:
        lines.append(f"and {len(findings) - _MAX_LINES} more (--format json lists all)")
    return lines if num_wrong else [*lines, f"{num_files} checked, nothing wrong"]
