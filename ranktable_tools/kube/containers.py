"""The commands of a pod's containers, from the parsed command line to the exit status."""

import argparse
import os
from typing import cast

from ranktable_tools.arguments import read_options
from ranktable_tools.devices.kinds import find_kind, present_devices
from ranktable_tools.errors import RanktableError
from ranktable_tools.kube.announcer import Announcer, PartOwner
from ranktable_tools.kube.api import KubeApi, access_in_pod
from ranktable_tools.kube.drain import drain
from ranktable_tools.kube.merging import ClusterSize
from ranktable_tools.kube.platform_table import PlatformTable, convert_if_changed, node_ports, wait_for_platform
from ranktable_tools.kube.retry_loop import repeat, until_signal
from ranktable_tools.kube.start import Start, exec_command, generate, variables, wait_for_table
from ranktable_tools.kube.waiting import WaitLimits
from ranktable_tools.kube.writer import ConfigMapNames, Writer
from ranktable_tools.tables import Role


def start(arguments: argparse.Namespace) -> int:
    """Replace this process by the command after `--`. Returns only by raising RanktableError."""
    wanted = Start(
        cast(Role, arguments.role), arguments.ip, arguments.folder, arguments.num_devices, arguments.port,
        arguments.device_type, arguments.device_ip_from, arguments.secret,
    )  # fmt: skip
    limits = WaitLimits(arguments.timeout, _print_line)
    if arguments.table:
        environ = _platform_variables(wanted, _platform(arguments), limits)
    else:
        local = generate(wanted, _print_line, os.environ)
        environ = variables(wanted, local, wait_for_table(wanted, local, limits))
    exec_command(arguments.words, environ)
    return 0


def announce(arguments: argparse.Namespace) -> int:
    """Send the part and fetch the table until a signal, then remove the part."""
    member = PartOwner(arguments.pod, arguments.folder, arguments.parts, arguments.ranktable)
    announcer = Announcer(KubeApi(access_in_pod(os.environ, arguments.account)), member)
    repeat(announcer.turn, until_signal(), arguments.every, _print_line)
    try:
        announcer.leave()
    except RanktableError as error:
        _print_line(f"the part of {arguments.pod} stays until the writer sees that the pod is gone: {error}")
    return 0


def write(arguments: argparse.Namespace) -> int:
    """Merge the parts into the table until a signal."""
    places = ConfigMapNames(arguments.parts, arguments.ranktable, arguments.selector)
    wanted = ClusterSize(_at_least_one(arguments, "prefill"), _at_least_one(arguments, "decode"))
    writer = Writer(KubeApi(access_in_pod(os.environ, arguments.account)), places, wanted)
    repeat(writer.turn, until_signal(), arguments.every, _print_line)
    return 0


def follow(arguments: argparse.Namespace) -> int:
    """Convert a platform's table whenever it changes, until a signal."""
    platform = _platform(arguments)

    def turn() -> list[str]:
        convert_if_changed(platform, arguments.folder)
        return []

    repeat(turn, until_signal(), arguments.every, _print_line)
    return 0


def drain_instance(arguments: argparse.Namespace) -> int:
    """Wait until the instance has no work. A preStop command cannot use $(POD_IP), so POD_IP is read here."""
    host = arguments.ip or os.environ.get("POD_IP", "")
    if not host:
        raise RanktableError("--ip is not given and POD_IP is not set: set one of them to the instance's address")
    _print_line(drain(host, arguments.http_port, settle_s=arguments.settle, timeout_s=arguments.timeout))
    return 0


def _platform_variables(wanted: Start, platform: PlatformTable, limits: WaitLimits) -> dict[str, str]:
    present = present_devices(wanted.device_type or find_kind())
    local, path, table = wait_for_platform(platform, wanted, limits, present)
    environ = variables(wanted, local, path)
    ports = None if wanted.port is None or wanted.role != "scheduler" else node_ports(table, wanted.port)
    return environ if ports is None else {**environ, "NODE_PORTS": ports}


def _platform(arguments: argparse.Namespace) -> PlatformTable:
    return PlatformTable(
        arguments.table, arguments.port, arguments.dialect, read_options(arguments), arguments.api_server
    )


def _at_least_one(arguments: argparse.Namespace, role: str) -> int:
    number: int = getattr(arguments, role)
    if number < 1:
        raise RanktableError(f"--{role} is {number}, but must be at least 1")
    return number


def _print_line(line: str) -> None:
    print(line, flush=True)
