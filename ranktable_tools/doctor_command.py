"""`ranktable doctor`: check a host and show on one screen what is wrong and how to fix it."""

import argparse
import os
import socket
import sys
from urllib.parse import urlsplit

from ranktable_tools.arguments import CONFIG_HELP, OneLineParser, add_command
from ranktable_tools.devices.kinds import KINDS
from ranktable_tools.doctor.case import GLOBAL_VARIABLE, LOCAL_VARIABLE, DoctorInput, read_tables
from ranktable_tools.doctor.examination import TIMEOUT_S, examine
from ranktable_tools.doctor.machine import Machine
from ranktable_tools.doctor.screen import json_text, text_lines
from ranktable_tools.doctor.verdict import worst
from ranktable_tools.errors import RanktableError

_MAX_MIB = 1024
_TLS = ("tls-cert", "tls-key", "tls-ca")
EPILOG = f"""\
Run it on each host, with the environment that start_servers.sh gets: it reads {GLOBAL_VARIABLE},
{LOCAL_VARIABLE} and NODE_PORTS. It changes nothing. `-` means there is nothing to check here yet.
Exit status: 0 if nothing needs fixing, 1 if something does, 2 for bad input.

examples:
  ranktable doctor
  ranktable doctor global_ranktable_10.0.0.18.json local_ranktable_10.0.0.18_45.json
  ranktable doctor --format json | jq '.findings[] | select(.result == "fail")'
"""


def add(commands: "argparse._SubParsersAction[OneLineParser]") -> None:
    """Add the subcommand."""
    parser = add_command(commands, "doctor", "Check this host and its connections to the others.")
    parser.epilog = f"{EPILOG}\n{CONFIG_HELP}"
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help=f"global and local table (default: those of {GLOBAL_VARIABLE} and "
        f"{LOCAL_VARIABLE})",
    )  # fmt: skip
    parser.add_argument("--url", help="the scheduler's URL (default: port 9000 on the table's scheduler)")
    for name in _TLS:
        parser.add_argument(f"--{name}", metavar="FILE", help="same as for the instances, if gRPC uses TLS")
    parser.add_argument("--device-type", choices=KINDS, help="default: npu or cuda if one is in /dev, else cpu")
    parser.add_argument("--share-devices", action="store_true", help="let two instances share one GPU")
    parser.add_argument("--mib", type=int, default=16, help=f"MiB sent over each link, 0 to {_MAX_MIB} (default: 16)")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds for all checks (default: 60)")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.set_defaults(command=_run_doctor)


def _run_doctor(arguments: argparse.Namespace) -> int:
    if not 0 <= arguments.mib <= _MAX_MIB:
        raise RanktableError(f"--mib {arguments.mib} is not in 0..{_MAX_MIB}")
    if not 0 < arguments.timeout <= 3600:
        raise RanktableError(f"--timeout is {arguments.timeout:g}, but must be more than 0 and at most 3600 seconds")
    _check_url(arguments.url)
    machine = Machine(os.environ, kind=arguments.device_type)
    given = {name: getattr(arguments, name.replace("-", "_")) for name in _TLS}
    tls = tuple(f"--{name}={value}" for name, value in given.items() if value is not None)
    tables = read_tables(arguments.files, machine, share_devices=arguments.share_devices)
    case = DoctorInput(machine, tables, arguments.url, arguments.mib, tls)
    from ranktable_tools.doctor.checks import CHECKS

    try:
        findings = examine(case, arguments.timeout, CHECKS)
    except KeyboardInterrupt:
        return 130
    title = f"ranktable doctor on {socket.gethostname()} ({machine.kind})"
    if arguments.format == "json":
        print(json_text(title, findings))
    else:
        colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        print("\n".join(text_lines(title, findings, colour=colour)))
    return 1 if worst([finding.verdict.result for finding in findings]) == "fail" else 0


def _check_url(url: str | None) -> None:
    if url is None:
        return
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        good = parts.scheme == "http" and bool(parts.hostname) and parts.port != 0 and parts.path in ("", "/")
    except ValueError:
        good = False
    if not good:
        raise RanktableError(f"--url {url!r} is not the address of a scheduler: write http://HOST:PORT")
