"""The command of Ascend's P/D guide, `pd_ranktable_tools --mode gen|merge|merge-local`: flags, files and messages."""

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import datetime

from ranktable_tools.arguments import OneLineParser, add_device_lists, add_ip, add_save_dir
from ranktable_tools.commands import GenArguments, gen
from ranktable_tools.errors import RanktableError
from ranktable_tools.gen_command import add_device_flags
from ranktable_tools.merge_files import merge_files, merge_local_files
from ranktable_tools.worker_kind import requested_worker

_EXAMPLES = """\
Write this host's tables, or merge the global tables of several hosts.

  python pd_ranktable_tools.py --mode gen --prefill-server-list 4,5 --decode-server-list 6,7 --api-server
  python pd_ranktable_tools.py --mode merge --global-ranktable-list A.json B.json --save-dir ./save_dir
  python pd_ranktable_tools.py --mode merge-local --local-ranktable-list A.json B.json --save-dir ./save_dir
With PyYAML installed, flags can come from a file that other commands read too:
  python pd_ranktable_tools.py --mode gen --config cluster.yaml
"""
_FLAGS = {
    "gen": ("api_server", "prefill_server_list", "decode_server_list", "ip", "device_type", "device_ip_from"),
    "merge": ("global_ranktable_list",),
    "merge-local": ("local_ranktable_list",),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; return the exit status: 0, or 2 for bad input."""
    try:
        arguments = command_parser().parse_args(argv)
        _refuse_flags_of_other_modes(arguments)
        _run(arguments)
    except RanktableError as error:
        return refuse(str(error))
    return 0


def refuse(message: str) -> int:
    """Print an error in the format of the guide's tool; return the exit status."""
    print(f"{_timestamp()}-ERROR: {message}", file=sys.stderr)
    return 2


def fields_of_other_modes(mode: str) -> frozenset[str]:
    """Return the fields that belong only to other modes."""
    return frozenset(name for other, names in _FLAGS.items() if other != mode for name in names)


def command_parser() -> OneLineParser:
    """Return the parser of the command line, also for callers that inspect its flags."""
    parser = OneLineParser(prog="pd_ranktable_tools", description=_EXAMPLES)
    parser.add_argument("--mode", choices=tuple(_FLAGS), default="gen", help="what to do (default: gen)")
    add_device_lists(parser)
    parser.add_argument("--api-server", action="store_true", help="gen: the scheduler is on this host")
    parser.add_argument("--global-ranktable-list", nargs="+", default=[], metavar="FILE", help="merge: the tables")
    parser.add_argument("--local-ranktable-list", nargs="+", default=[], metavar="FILE", help="merge-local: the tables")
    add_save_dir(parser)
    add_ip(parser)
    add_device_flags(parser)
    return parser


def _run(arguments: argparse.Namespace) -> None:
    if arguments.mode == "merge":
        merge_files(arguments.global_ranktable_list, arguments.save_dir, _print_info)
    elif arguments.mode == "merge-local":
        merge_local_files(arguments.local_ranktable_list, arguments.save_dir, _print_info)
    else:
        lists = (arguments.prefill_server_list, arguments.decode_server_list)
        devices = (arguments.device_type, arguments.device_ip_from)
        place = (arguments.api_server, arguments.save_dir, arguments.ip)
        gen(GenArguments(*lists, *place, None, *devices, worker=requested_worker(os.environ)), _print_info)


def _refuse_flags_of_other_modes(arguments: argparse.Namespace) -> None:
    for mode, names in _FLAGS.items():
        for name in names if mode != arguments.mode else ():
            if getattr(arguments, name):
                flag = f"--{name.replace('_', '-')}"
                raise RanktableError(f"{flag} belongs to --mode {mode}, not to --mode {arguments.mode}")


def _print_info(line: str) -> None:
    print(f"{_timestamp()}-INFO: {line}")


def _timestamp() -> str:
    return datetime.now().strftime("%Y-%m-%d %H:%M:%S,%f")[:-3]


if __name__ == "__main__":
    raise SystemExit(main())
