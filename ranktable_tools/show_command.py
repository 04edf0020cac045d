"""`ranktable show`: draw a table's members and the connections between them."""

import argparse

from ranktable_tools.any_file import read_table
from ranktable_tools.arguments import OneLineParser, add_command, add_dialect, add_read_options, read_options
from ranktable_tools.rules.rule import RuleOptions
from ranktable_tools.show import show


def add(commands: "argparse._SubParsersAction[OneLineParser]") -> None:
    """Add the subcommand."""
    parser = add_command(commands, "show", "Draw a table's members and the connections between them.")
    parser.add_argument("file", metavar="FILE")
    add_dialect(parser)
    add_read_options(parser)
    parser.set_defaults(command=_show)


def _show(arguments: argparse.Namespace) -> int:
    shared = RuleOptions(share_devices=True)
    print("\n".join(show(read_table(arguments.file, arguments.dialect, read_options(arguments), shared))))
    return 0
