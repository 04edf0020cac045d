"""`ranktable merge`: one global table of several hosts' ones, and the cluster secret beside it."""

import argparse
import os
from pathlib import Path

from ranktable_tools.arguments import OneLineParser, add_command, add_save_dir
from ranktable_tools.commands import merge_files
from ranktable_tools.merge import MERGED_NAME
from ranktable_tools.next_steps import after_merge
from ranktable_tools.secret import ensure_secret


def add(commands: "argparse._SubParsersAction[OneLineParser]") -> None:
    """Add the subcommand."""
    parser = add_command(commands, "merge", "Make one global table of several hosts' ones.")
    parser.add_argument(
        "--global-ranktable-list", nargs="+", required=True, metavar="FILE", help="the tables, in order"
    )
    add_save_dir(parser)
    parser.set_defaults(command=_merge)


def _merge(arguments: argparse.Namespace) -> int:
    merge_files(arguments.global_ranktable_list, arguments.save_dir, print)
    path, is_new = ensure_secret(Path(arguments.save_dir))
    print(f"Save {path}" if is_new else f"Keep {path}")
    print("\n".join(after_merge(os.path.join(arguments.save_dir, MERGED_NAME), str(path))))
    return 0
