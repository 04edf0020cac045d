"""`ranktable lint`: everything wrong with some tables."""

import argparse

from ranktable_tools.arguments import OneLineParser, add_command
from ranktable_tools.lint import lint


def add(commands: "argparse._SubParsersAction[OneLineParser]") -> None:
    """Add the subcommand."""
    parser = add_command(commands, "lint", "List everything wrong with these tables.")
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.set_defaults(command=_lint)


def _lint(arguments: argparse.Namespace) -> int:
    lines = lint(arguments.files)
    print("\n".join(lines) if lines else f"{len(arguments.files)} checked, nothing wrong")
    return 2 if lines else 0
