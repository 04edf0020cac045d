"""The command lines of the containers: start, announce, write, follow and drain."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ranktable_tools.arguments import OneLineParser, add_command, add_dialect, add_read_options
from ranktable_tools.errors import RanktableError
from ranktable_tools.gen_command import add_device_flags
from ranktable_tools.kube import containers
from ranktable_tools.kube.api import ACCOUNT

_ABOUT = """\
What the containers of a pod run; deploy/helm and deploy/kubernetes have the whole lines.
  start     the role's own container: tables of this pod, wait for the cluster's table, then the command after --
  announce  beside it, with the pod's token: the part goes to the API server, the table comes from it
  write     one pod of the cluster: makes the table of the parts
  follow    beside `start --table`: converts a platform's table of another dialect whenever it changes
  drain     before the container ends: waits until the instance has no work
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; return the exit status: 0, or 2 for bad input."""
    try:
        arguments = parse_words(sys.argv[1:] if argv is None else argv)
        status: int = arguments.command(arguments)
        return status
    except RanktableError as error:
        print(f"ranktable kube: {error}", file=sys.stderr)
        return 2


def parse_words(words: Sequence[str]) -> argparse.Namespace:
    """Return what was typed; `words` is the command after `--`. Raises RanktableError."""
    cut = list(words).index("--") if "--" in words else len(words)
    arguments = _parser().parse_args(words[:cut])
    arguments.words = list(words[cut + 1 :])
    return arguments


def _parser() -> OneLineParser:
    parser = OneLineParser(prog="python -m ranktable_tools.kube", description=_ABOUT)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_start(add_command(commands, "start", "Become the process of a role, once the table has this pod."))
    _add_announce(add_command(commands, "announce", "Send this pod's part, and bring the table."))
    _add_write(add_command(commands, "write", "Make the cluster's table of its pods' parts."))
    _add_follow(add_command(commands, "follow", "Convert a platform's table whenever it changes."))
    _add_drain(add_command(commands, "drain", "Wait until the instance has no work."))
    return parser


def _add_start(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--role", required=True, choices=("scheduler", "prefill", "decode"))
    parser.add_argument("--ip", required=True, metavar="IP", help="where the others reach this pod: status.podIP")
    _add_folder(parser)
    parser.add_argument("--num-devices", type=int, default=1, metavar="N", help="devices of the instance (default: 1)")
    add_device_flags(parser)
    parser.add_argument("--port", type=int, metavar="PORT", help="the instance's --port; written into the table")
    parser.add_argument("--secret", type=Path, metavar="FILE", help="the cluster secret, as it is mounted")
    parser.add_argument(
        "--timeout", type=float, default=1800.0, metavar="S", help="for the whole table (default: 1800)"
    )
    _add_platform(parser, required=False)
    parser.set_defaults(command=containers.start)


def _add_announce(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pod", required=True, metavar="NAME", help="this pod: metadata.name")
    _add_folder(parser)
    _add_maps(parser)
    _add_account(parser)
    _add_every(parser)
    parser.set_defaults(command=containers.announce)


def _add_write(parser: argparse.ArgumentParser) -> None:
    _add_maps(parser)
    parser.add_argument("--selector", required=True, metavar="LABELS", help="the cluster's pods, as app=pdserve")
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}", type=int, required=True, metavar="N", help=f"{role} instances that make the first table whole"
        )
    _add_account(parser)
    _add_every(parser)
    parser.set_defaults(command=containers.write)


def _add_follow(parser: argparse.ArgumentParser) -> None:
    _add_folder(parser)
    parser.add_argument("--port", type=int, metavar="PORT", help="every instance's, where the table has none")
    _add_platform(parser, required=True)
    _add_every(parser)
    parser.set_defaults(command=containers.follow)


def _add_drain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ip", metavar="IP", help="the instance's address (default: POD_IP)")
    parser.add_argument("--http-port", type=int, required=True, metavar="PORT", help="the instance's own")
    parser.add_argument("--settle", type=float, default=10.0, metavar="S", help="wait at least so long (default: 10)")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="and at most so long (default: 60)")
    parser.set_defaults(command=containers.drain_instance)


def _add_maps(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", required=True, metavar="NAME", help="the ConfigMap of the pods' parts")
    parser.add_argument("--ranktable", required=True, metavar="NAME", help="the ConfigMap of the cluster's table")


def _add_account(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--account", type=Path, default=ACCOUNT, metavar="DIR", help=f"token, ca.crt and namespace (default: {ACCOUNT})"
    )


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, required=True, metavar="DIR", help="what the pod's containers share")


def _add_every(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--every", type=float, default=2.0, metavar="S", help="look again after so long (default: 2)")


def _add_platform(parser: argparse.ArgumentParser, *, required: bool) -> None:
    parser.add_argument(
        "--table", type=Path, required=required, metavar="FILE", help="a platform's table, used as it is"
    )
    add_dialect(parser)
    add_read_options(parser)
    parser.add_argument("--api-server", metavar="IP", help="the scheduler's address, where the table names none")
