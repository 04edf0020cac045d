"""`ranktable diff`: print the differences of two tables in sentences; the exit status is 1 if there are any."""

import argparse

from ranktable_tools.any_file import read_table
from ranktable_tools.arguments import OneLineParser, add_command, add_read_options, read_options
from ranktable_tools.diff import diff
from ranktable_tools.errors import RanktableError
from ranktable_tools.rules.rule import RuleOptions
from ranktable_tools.tables import Table

_DESCRIPTION = "Print how two tables differ. Exit status 0: no difference, 1: differences, 2: an invalid table."
_OF = {"cluster": "a cluster", "instance": "one member"}


def add(commands: "argparse._SubParsersAction[OneLineParser]") -> None:
    """Add the subcommand."""
    parser = add_command(commands, "diff", _DESCRIPTION)
    parser.add_argument("old", metavar="OLD")
    parser.add_argument("new", metavar="NEW")
    parser.add_argument("--dialect", metavar="NAME", help="dialect of both tables, if not clear from their structure")
    parser.add_argument("--old-dialect", metavar="NAME", help="dialect of the first table only")
    parser.add_argument("--new-dialect", metavar="NAME", help="dialect of the second table only")
    add_read_options(parser)
    parser.set_defaults(command=_diff)


def _diff(arguments: argparse.Namespace) -> int:
    old = _table(arguments, arguments.old, arguments.old_dialect)
    new = _table(arguments, arguments.new, arguments.new_dialect)
    if old.kind != new.kind:
        a, b = (f"the table of {_OF[table.kind]}" for table in (old, new))
        raise RanktableError(f"{arguments.old} is {a}, but {arguments.new} is {b}")
    sentences = diff(old, new)
    print("\n".join(sentences) if sentences else "No differences.")
    return 1 if sentences else 0


def _table(arguments: argparse.Namespace, path: str, dialect: str | None) -> Table:
    shared = RuleOptions(share_devices=True)
    return read_table(path, dialect or arguments.dialect, read_options(arguments), shared).reading.table
