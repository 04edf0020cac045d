"""The guide's `pd_ranktable_tools --mode gen|merge`: its flags, its files, its messages."""

import argparse
import sys
from collections.abc import Sequence
from datetime import datetime

from ranktable_tools.arguments import OneLineParser, add_device_lists, add_ip, add_save_dir
from ranktable_tools.commands import GenArguments, gen, merge_files
from ranktable_tools.errors import RanktableError

_EXAMPLES = """\
Write this host's tables, or make one global table of several hosts' ones.

  python pd_ranktable_tools.py --mode gen --prefill-server-list 4,5 --decode-server-list 6,7 --api-server
  python pd_ranktable_tools.py --mode merge --global-ranktable-list A.json B.json --save-dir ./save_dir
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; return the exit status: 0, or 2 for bad input."""
    try:
        arguments = _parser().parse_args(argv)
        run = _gen if arguments.mode == "gen" else _merge
        run(arguments)
    except RanktableError as error:
        print(f"{_timestamp()}-ERROR: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> OneLineParser:
    parser = OneLineParser(prog="pd_ranktable_tools", description=_EXAMPLES)
    parser.add_argument("--mode", choices=("gen", "merge"), default="gen", help="what to do (default: gen)")
    add_device_lists(parser)
    parser.add_argument("--api-server", action="store_true", help="gen: the scheduler is on this host")
    parser.add_argument("--global-ranktable-list", nargs="+", default=[], metavar="FILE", help="merge: the tables")
    add_save_dir(parser)
    add_ip(parser)
    return parser


def _gen(arguments: argparse.Namespace) -> None:
    _refuse(arguments, "gen", ("global_ranktable_list",))
    gen(
        GenArguments(
            arguments.prefill_server_list, arguments.decode_server_list, arguments.api_server, arguments.save_dir,
            arguments.ip,
        ),
        _say,
    )  # fmt: skip


def _merge(arguments: argparse.Namespace) -> None:
    _refuse(arguments, "merge", ("api_server", "prefill_server_list", "decode_server_list", "ip"))
    merge_files(arguments.global_ranktable_list, arguments.save_dir, _say)


def _refuse(arguments: argparse.Namespace, mode: str, names: Sequence[str]) -> None:
    other = "merge" if mode == "gen" else "gen"
    for name in names:
        if getattr(arguments, name):
            raise RanktableError(f"--{name.replace('_', '-')} belongs to --mode {other}, not to --mode {mode}")


def _say(line: str) -> None:
    print(f"{_timestamp()}-INFO: {line}")


def _timestamp() -> str:
    return datetime.now().strftime("%Y-%m-%d %H:%M:%S,%f")[:-3]


if __name__ == "__main__":
    raise SystemExit(main())
