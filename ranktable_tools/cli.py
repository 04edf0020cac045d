"""The command `ranktable`: gen, merge, lint and show."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ranktable_tools.arguments import OneLineParser, add_device_lists, add_ip, add_save_dir
from ranktable_tools.commands import GenArguments, gen, merge_files
from ranktable_tools.errors import RanktableError
from ranktable_tools.lint import lint
from ranktable_tools.merge import MERGED_NAME
from ranktable_tools.next_steps import after_gen, after_merge
from ranktable_tools.secret import ensure_secret
from ranktable_tools.show import show_local, show_part
from ranktable_tools.table_file import is_global, read_local, read_part
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
    _add_gen(_command(commands, "gen", "Write this host's tables."))
    _add_merge(_command(commands, "merge", "Make one global table of several hosts' ones."))
    lint_parser = _command(commands, "lint", "List everything wrong with these tables.")
    lint_parser.add_argument("files", nargs="+", metavar="FILE")
    lint_parser.set_defaults(command=_lint)
    show_parser = _command(commands, "show", "Say what a table says and who talks to whom.")
    show_parser.add_argument("file", metavar="FILE")
    show_parser.set_defaults(command=_show)
    return parser


def _command(commands: "argparse._SubParsersAction[OneLineParser]", name: str, does: str) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=does, description=does)


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


def _add_merge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--global-ranktable-list", nargs="+", required=True, metavar="FILE", help="the tables, in order"
    )
    add_save_dir(parser)
    parser.set_defaults(command=_merge)


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
        _keep_secret(arguments.save_dir)
    print("\n".join(after_gen(generated, arguments.save_dir)))
    return 0


def _merge(arguments: argparse.Namespace) -> int:
    merge_files(arguments.global_ranktable_list, arguments.save_dir, print)
    secret = _keep_secret(arguments.save_dir)
    print("\n".join(after_merge(os.path.join(arguments.save_dir, MERGED_NAME), str(secret))))
    return 0


def _keep_secret(save_dir: str) -> Path:
    path, is_new = ensure_secret(Path(save_dir))
    print(f"Save {path}" if is_new else f"Keep {path}")
    return path


def _lint(arguments: argparse.Namespace) -> int:
    lines = lint(arguments.files)
    print("\n".join(lines) if lines else f"{len(arguments.files)} checked, nothing wrong")
    return 2 if lines else 0


def _show(arguments: argparse.Namespace) -> int:
    path: str = arguments.file
    lines = show_part(path, read_part(path)) if is_global(path) else show_local(path, read_local(path))
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
