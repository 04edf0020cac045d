"""`ranktable merge` and `merge-local`: merge several tables; merge also writes the cluster secret beside the result."""

import argparse
import os
from pathlib import Path

from ranktable_tools.arguments import OneLineParser, add_command, add_owner, add_save_dir
from ranktable_tools.file_names import MERGED_GLOBAL
from ranktable_tools.merge_files import merge_files, merge_local_files
from ranktable_tools.next_steps import after_merge
from ranktable_tools.secret import change_owner, check_owner, check_secret, ensure_secret

_OVER_SERVERS = (
    "One instance over several servers, for other tools. pdserve cannot start it: its instances are on one server each."
)


def add(commands: "argparse._SubParsersAction[OneLineParser]") -> None:
    """Add both subcommands."""
    parser = add_command(commands, "merge", "Merge the global tables of several hosts.")
    parser.add_argument(
        "--global-ranktable-list", nargs="+", required=True, metavar="FILE", help="the tables, in order"
    )
    parser.add_argument("--share-devices", action="store_true", help="let two instances share one GPU")
    add_owner(parser)
    add_save_dir(parser)
    parser.set_defaults(command=_merge)
    local = add_command(commands, "merge-local", "Join local tables into one instance over several servers.")
    local.add_argument("--local-ranktable-list", nargs="+", required=True, metavar="FILE", help="the tables, in order")
    add_save_dir(local)
    local.set_defaults(command=_merge_local)


def _merge(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.save_dir)
    if arguments.owner is not None:
        check_owner(folder, arguments.owner)
    check_secret(folder, arguments.owner, can_give=True)
    merge_files(arguments.global_ranktable_list, arguments.save_dir, print, share_devices=arguments.share_devices)
    path, is_new = ensure_secret(folder, arguments.owner)
    print(f"Save {path}" if is_new else f"Keep {path}")
    merged = os.path.join(arguments.save_dir, MERGED_GLOBAL)
    if arguments.owner is not None:
        for file in (Path(merged), path):
            change_owner(file, arguments.owner)
        print(f"Both belong to uid {arguments.owner}.")
    print("\n".join(after_merge(merged, str(path))))
    return 0


def _merge_local(arguments: argparse.Namespace) -> int:
    table = merge_local_files(arguments.local_ranktable_list, arguments.save_dir, print)
    if len(table.instances[0].servers) > 1:
        print(_OVER_SERVERS)
    return 0
