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
The commands of a pod's containers; deploy/helm and deploy/kubernetes have the full command lines.
  start     the role's main container: make this pod's tables, wait for the cluster's, then run the command after --
  announce  its sidecar, with the pod's token: send the part to the API server, fetch the table
  write     one pod of the cluster: merge the parts into the table
  follow    the sidecar of `start --table`: convert a platform's table of another dialect whenever it changes
  drain     before the container stops: wait until the instance has no work
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
    """Return the parsed arguments; `words` is the command after `--`. Raises RanktableError."""
    cut = list(words).index("--") if "--" in words else len(words)
    arguments = _parser().parse_args(words[:cut])
    arguments.words = list(words[cut + 1 :])
    return arguments


def _parser() -> OneLineParser:
    parser = OneLineParser(prog="python -m ranktable_tools.kube", description=_ABOUT)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_start(add_command(commands, "start", "Run the process of a role once the table has this pod."))
    _add_announce(add_command(commands, "announce", "Send this pod's part and fetch the table."))
    _add_write(add_command(commands, "write", "Merge the pods' parts into the cluster's table."))
    _add_follow(add_command(commands, "follow", "Convert a platform's table whenever it changes."))
    _add_drain(add_command(commands, "drain", "Wait until the instance has no work."))
    return parser


def _add_start(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--role", required=True, choices=("scheduler", "prefill", "decode"))
    parser.add_argument("--ip", required=True, metavar="IP", help="this pod's address for others: status.podIP")
    _add_folder(parser)
    parser.add_argument("--num-devices", type=int, default=1, metavar="N", help="devices of the instance (default: 1)")
    add_device_flags(parser)
    parser.add_argument("--port", type=int, metavar="PORT", help="the instance's --port; written into the table")
    parser.add_argument("--secret", type=Path, metavar="FILE", help="the mounted cluster secret")
    parser.add_argument(
        "--timeout", type=float, default=1800.0, metavar="S", help="time limit for the complete table (default: 1800)"
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
    parser.add_argument("--selector", required=True, metavar="LABELS", help="the cluster's pods, such as app=pdserve")
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}", type=int, required=True, metavar="N", help=f"{role} instances in the first complete table"
        )
    _add_account(parser)
    _add_every(parser)
    parser.set_defaults(command=containers.write)


def _add_follow(parser: argparse.ArgumentParser) -> None:
    _add_folder(parser)
    parser.add_argument("--port", type=int, metavar="PORT", help="port of every instance, if the table has none")
    _add_platform(parser, required=True)
    _add_every(parser)
    parser.set_defaults(command=containers.follow)


def _add_drain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ip", metavar="IP", help="the instance's address (default: POD_IP)")
    parser.add_argument("--http-port", type=int, required=True, metavar="PORT", help="the instance's --http-port")
    parser.add_argument("--settle", type=float, default=10.0, metavar="S", help="minimum wait (default: 10)")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="maximum wait (default: 60)")
    parser.set_defaults(command=containers.drain_instance)


def _add_maps(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", required=True, metavar="NAME", help="the ConfigMap of the pods' parts")
    parser.add_argument("--ranktable", required=True, metavar="NAME", help="the ConfigMap of the cluster's table")


def _add_account(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--account", type=Path, default=ACCOUNT, metavar="DIR", help=f"token, ca.crt and namespace (default: {ACCOUNT})"
    )


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, required=True, metavar="DIR", help="shared by the pod's containers")


def _add_every(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--every", type=float, default=2.0, metavar="S", help="polling interval (default: 2)")


def _add_platform(parser: argparse.ArgumentParser, *, required: bool) -> None:
    parser.add_argument(
        "--table", type=Path, required=required, metavar="FILE", help="a platform's table, used instead of a merged one"
    )
    add_dialect(parser)
    add_read_options(parser)
    parser.add_argument("--api-server", metavar="IP", help="the scheduler's address, if the table has none")
