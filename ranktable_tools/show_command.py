"""`ranktable show`: what a table says and who talks to whom."""

import argparse

from ranktable_tools.arguments import OneLineParser, add_command
from ranktable_tools.show import show_local, show_part
from ranktable_tools.table_file import is_global, read_local, read_part


def add(commands: "argparse._SubParsersAction[OneLineParser]") -> None:
    """Add the subcommand."""
    parser = add_command(commands, "show", "Say what a table says and who talks to whom.")
    parser.add_argument("file", metavar="FILE")
    parser.set_defaults(command=_show)


def _show(arguments: argparse.Namespace) -> int:
    path: str = arguments.file
    lines = show_part(path, read_part(path)) if is_global(path) else show_local(path, read_local(path))
    print("\n".join(lines))
    return 0
