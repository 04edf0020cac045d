"""The command `ranktable`: its subcommands, each but gen in a module of its own, and its exit status."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ranktable_tools import lint_command, merge_command, show_command
from ranktable_tools.arguments import OneLineParser, add_command, add_device_lists, add_ip, add_save_dir
from ranktable_tools.commands import GenArguments, gen
from ranktable_tools.errors import RanktableError
from ranktable_tools.next_steps import after_gen
from ranktable_tools.secret import ensure_secret
from ranktable_tools.tables import whole

_EXAMPLES = """\
A ranktable says who belongs to the cluster: one scheduler, its prefill and its decode instances.

One host, a prefill instance on devices 4 and 5, a decode instance on 6 and 7:
  ranktable gen --prefill-server-list 4,5 --decode-server-list 6,7
Two instances of each role, one device each, with the ports written into the table:
  ranktable gen --prefill-server-list 0 1 --decode-server-list 2 3 --ports 8088,8089,8090,8091
Two hosts: gen on each, then merge the two global tables on one of them:
  hostA$ ranktable gen --prefill-server-list 0,1 --api-server
  hostB$ ranktable gen --decode-server-list 0,1
  hostA$ ranktable merge --global-ranktable-list global_ranktable_A.json global_ranktable_B.json
Look at a table, and check it with the local ones:
  ranktable show global_ranktable_10.0.0.18.json
  ranktable lint global_ranktable_10.0.0.18.json local_ranktable_10.0.0.18_*.json
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; return the exit status: 0, or 2 for bad input."""
    try:
        arguments = _parser().parse_args(argv)
        command: Callable[[argparse.Namespace], int] = arguments.command
        return command(arguments)
    except RanktableError as error:
        print(f"ranktable: {error}", file=sys.stderr)
        return 2


def _parser() -> OneLineParser:
    parser = OneLineParser(prog="ranktable", description=_EXAMPLES)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_gen(add_command(commands, "gen", "Write this host's tables."))
    for module in (merge_command, lint_command, show_command):
        module.add(commands)
    return parser


def _add_gen(parser: argparse.ArgumentParser) -> None:
    add_device_lists(parser)
    parser.add_argument(
        "--api-server",
        action=argparse.BooleanOptionalAction,
        help="the scheduler is on this host (default: when both lists are given)",
    )
    add_save_dir(parser)
    add_ip(parser)
    parser.add_argument("--ports", metavar="P,P", help="write each instance's port into the table, prefill first")
    parser.add_argument(
        "--device-type",
        choices=("cpu", "cuda", "npu"),
        help="npu asks hccn_tool for device addresses (default: npu where there is one)",
    )
    parser.set_defaults(command=_gen)


def _gen(arguments: argparse.Namespace) -> int:
    both = bool(arguments.prefill_server_list and arguments.decode_server_list)
    wanted = arguments.api_server
    generated = gen(
        GenArguments(
            arguments.prefill_server_list, arguments.decode_server_list, both if wanted is None else wanted,
            arguments.save_dir, arguments.ip, arguments.ports, arguments.device_type,
        ),
        print,
    )  # fmt: skip
    if wanted is None and both:
        print("Both lists were given, so the scheduler is on this host too (--no-api-server leaves it out).")
    if whole(generated.part) is not None:
        path, is_new = ensure_secret(Path(arguments.save_dir))
        print(f"Save {path}" if is_new else f"Keep {path}")
    print("\n".join(after_gen(generated, arguments.save_dir)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
