"""The command `ranktable`: its subcommands, each in its own module, and its exit status."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence

from ranktable_tools import (
    convert_command,
    diff_command,
    doctor_command,
    gen_command,
    lint_command,
    merge_command,
    show_command,
    watch_command,
)
from ranktable_tools.arguments import OneLineParser
from ranktable_tools.errors import RanktableError

_EXAMPLES = """\
A ranktable lists the members of the cluster: one scheduler, its prefill and its decode instances.

One host, a prefill instance on devices 4 and 5, a decode instance on 6 and 7:
  ranktable gen --prefill-server-list 4,5 --decode-server-list 6,7
Two instances of each role, one device each, with the ports written into the table:
  ranktable gen --prefill-server-list 0 1 --decode-server-list 2 3 --ports 8088,8089,8090,8091
Two hosts: gen on each, then merge the two global tables on one of them:
  hostA$ ranktable gen --prefill-server-list 0,1 --api-server
  hostB$ ranktable gen --decode-server-list 0,1
  hostA$ ranktable merge --global-ranktable-list global_ranktable_A.json global_ranktable_B.json
Look at a table, and check it together with its local tables:
  ranktable show global_ranktable_10.0.0.18.json
  ranktable lint global_ranktable_10.0.0.18.json local_ranktable_10.0.0.18_*.json
Convert another tool's table to tables for pdserve, and compare two tables:
  ranktable convert rank_table.json --to modelarts --num-prefill 1 --save-dir tables
  ranktable diff old.json new.json
Print each change of a table as it happens:
  ranktable watch global_ranktable_10.0.0.18.json
Check a host and its connections to the others:
  ranktable doctor global_ranktable_10.0.0.18.json local_ranktable_10.0.0.18_45.json
With pdserve installed, every subcommand can read its flags from a file:
  ranktable gen --config cluster.yaml
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; return the exit status: 0, 2 for bad input, 130 after Ctrl-C, 141 after EPIPE."""
    try:
        status = _run(argv)
        sys.stdout.flush()
        return status
    except RanktableError as error:
        print(f"ranktable: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader, such as `head`, has exited; keep the interpreter from reporting it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(argv: Sequence[str] | None) -> int:
    arguments = command_parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    return command(arguments)


def command_parsers() -> Mapping[str, argparse.ArgumentParser]:
    """Return the parser of each subcommand, for callers that inspect its flags."""
    commands = next(one for one in command_parser()._actions if isinstance(one, argparse._SubParsersAction))
    return commands.choices


def command_parser() -> OneLineParser:
    """Return the parser of the command line with its subcommands."""
    parser = OneLineParser(prog="ranktable", description=_EXAMPLES)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in (
        gen_command,
        merge_command,
        convert_command,
        lint_command,
        show_command,
        diff_command,
        doctor_command,
        watch_command,
    ):
        module.add(commands)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
