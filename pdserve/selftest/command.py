"""`pdserve selftest`: test every op, link and serving mode on one device; print a table and write a report file."""

import argparse
import contextlib
import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from devices.interface import Device
from devices.table import AUTO, AUTO_ORDER, choose, find_kind
from engine.torch_start import prepare_torch
from flags.options import add_flags, flag, from_namespace
from pdserve.flags.parser import CommandParser
from pdserve.selftest.captured_output import stderr_into
from pdserve.selftest.check import GROUPS, CheckStatus, Result, SelftestCheck, run_all
from pdserve.selftest.far_process import FarProcesses
from pdserve.selftest.report import SelftestReport, Tested, default_path, row, summary
from pdserve.termination import unwind_on_sigterm
from pdserve.work_folder import work_folder
from ranktable_tools.core_quota import usable_threads
from ranktable_tools.devices.kinds import kind_named
from ranktable_tools.doctor.machine import Machine
from telemetry import logs
from wire.errors import ConfigError

EPILOG = """\
Every op of a step is compared with the reference on the CPU, a few MB of KV are sent over each link that the device
supports, and a tiny random model must give the tokens of transformers, combined and by P/D. Nothing is downloaded.
A row `not here` shows what is missing; it is not a failure.

examples:
  pdserve selftest                                 on the device that --device auto would choose
  pdserve selftest --device npu --index 1          on the second NPU visible to this process
  pdserve selftest --only links 'linear layers'    only two groups of rows
  pdserve selftest --report /tmp/selftest.md       exit status 1 if a check failed; details are in the file
"""


@dataclass(frozen=True, slots=True)
class SelftestOptions:
    """Flags of `selftest`."""

    device: str = flag(AUTO, f"device to test: {AUTO}, {', '.join(reversed(AUTO_ORDER))}; auto as for serving")
    index: int = flag(0, "index among the devices visible to this process", parse=int)
    only: tuple[str, ...] = flag(
        (), f"rows whose group or name contains one of these; the groups are {', '.join(GROUPS)} (default: all)",
        many=True,
    )  # fmt: skip
    report: str = flag("", "file for the report (default: pdserve-selftest-DEVICE-TIME.md in the current folder)")


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0 if no check failed, else 1. Raises ConfigError for a missing device.

    On Ctrl-C the report has the results so far.
    """
    options = parse(argv)
    logs.configure("ERROR")  # a fallback appears as a row and a note
    unwind_on_sigterm()
    prepare_torch(usable_threads())
    choice = choose(options.device)
    if choice.kind.traits.pools_on_host and options.index:
        raise ConfigError(f"--index is {options.index}, but the only {choice.kind.traits.kind} device has index 0")
    device = choice.kind.open(options.index)
    device.activate()
    began = time.strftime("%Y-%m-%d %H:%M:%S %z")
    command = shlex.join(["pdserve", "selftest", *argv])
    tested = Tested(device.name, choice.reason, device.describe(), command, began)
    print(f"{tested.choice}\n{tested.described}", flush=True)
    path = Path(options.report) if options.report else default_path(device.name, time.strftime("%Y%m%d-%H%M%S"))
    with work_folder("selftest") as work:
        report = SelftestReport(path, tested, Machine(os.environ, kind=kind_named(choice.kind.traits.kind)), work)
        results, notes = _run(device, options, work, report)
    for note in notes:
        if "reference" in note or "instead of" in note:
            print(f"note: {note}", flush=True)
    _print_summary(results, len(results), path)
    return 1 if any(result.verdict is CheckStatus.FAILED for result in results) else 0


def parse(argv: Sequence[str]) -> SelftestOptions:
    """Parse the command line. Raises ConfigError."""
    parser = CommandParser(
        prog="pdserve selftest",
        description="Test every op, link and serving mode on one device, and write a report.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser, SelftestOptions, "selftest")
    options = from_namespace(SelftestOptions, parser.parse_args(argv))
    if options.index < 0:
        raise ConfigError(f"--index {options.index}: the first device is 0")
    if options.report and not Path(options.report).absolute().parent.is_dir():
        raise ConfigError(f"--report {options.report}: {Path(options.report).absolute().parent} is not a folder")
    return options


def _run(
    device: Device, options: SelftestOptions, work: Path, report: SelftestReport
) -> tuple[list[Result], tuple[str, ...]]:  # fmt: skip
    """Run the requested rows; return their results, and notes from loading the tiny model.

    The report is written before each row: one that hangs, or ends the process, is listed in it as running.
    """
    from pdserve.selftest.pd import TinyModel

    results: list[Result] = []
    running: str | None = None
    model = TinyModel(work / "model", device.traits.kind)
    with contextlib.ExitStack() as stack:
        far = FarProcesses(work)
        stack.callback(far.close)
        known = _all_checks(device, model, results, far, stack)
        checks = [check for check in known if _is_selected(check, options.only)]
        if not checks:
            groups = ", ".join(dict.fromkeys(check.group for check in known))
            raise ConfigError(f"--only {' '.join(options.only)} matches no row; the groups are {groups}")
        try:
            for check in checks:
                running = f"{check.group}: {check.name}"
                report.write(results, len(checks), running)
                with stderr_into(work / "self-test.log"):
                    results += run_all([check])
                running = None
                print(row(len(results), len(checks), results[-1]), flush=True)
        except KeyboardInterrupt:
            report.write(results, len(checks), running)
            _print_summary(results, len(checks), report.path)
            raise
    report.tested = replace(report.tested, notes=model.notes)
    report.write(results, len(checks))
    return results, model.notes


def _print_summary(results: Sequence[Result], num_checks: int, path: Path) -> None:
    print(f"{summary(results, num_checks)}\nreport: {path}", flush=True)


def _is_selected(check: SelftestCheck, only: Sequence[str]) -> bool:
    return not only or any(part in f"{check.group}: {check.name}" for part in only)


def _all_checks(
    device: Device, model: object, results: Sequence[Result], far: FarProcesses, stack: contextlib.ExitStack
) -> list[SelftestCheck]:
    from engine.attention.backends import make_backend
    from engine.fused.kernels import NO_KERNELS, find_kernels
    from pdserve.selftest.attention import attention_checks
    from pdserve.selftest.linears import linear_checks
    from pdserve.selftest.links import link_checks
    from pdserve.selftest.lost_peer import lost_peer_checks
    from pdserve.selftest.ops import op_checks
    from pdserve.selftest.parts import part_checks
    from pdserve.selftest.pd import TinyModel, model_checks

    assert isinstance(model, TinyModel)
    on_host = device.traits.pools_on_host
    kernels = find_kernels(usable_threads()) if on_host else NO_KERNELS
    if kernels.threads is not None:
        stack.callback(kernels.threads.close)
    host = device if on_host else find_kind(AUTO_ORDER[-1]).open()
    links = list(link_checks(device, other := _other_card(device), host, far))
    return [
        *attention_checks(device, lambda: make_backend(AUTO, device, kernels.threads)),
        *op_checks(device),
        *part_checks(device),
        *linear_checks(device),
        *links,
        *lost_peer_checks(device, other, far),
        *model_checks(model, _usable_links(device, other, links, results)),
    ]


def _other_card(device: Device) -> Device:
    """Return the next card visible to this process, or the same one if it is the only one."""
    import torch

    kind, _, index = device.name.partition(":")
    count = torch.get_device_module(device.torch_device).device_count()
    return device if count < 2 else find_kind(kind).open((int(index) + 1) % count)


def _usable_links(
    device: Device, other: Device, links: Sequence[SelftestCheck], results: Sequence[Result]
) -> Callable[[], list[str]]:
    """Return a function that returns the transports that work from the device to `other` within one process.

    It runs the link checks that --only left out.
    """
    from pdserve.selftest.links import works_in_one_process

    end = f", {device.name} to {other.name}"

    def names() -> list[str]:
        ran = {(result.group, result.name) for result in results}
        left = [check for check in links if check.name.endswith(end) and (check.group, check.name) not in ran]
        ended = [one for one in (*results, *run_all(left)) if one.group == "links" and one.name.endswith(end)]
        usable = [one.name.removesuffix(end) for one in ended if one.verdict is CheckStatus.OK]
        return [name for name in usable if works_in_one_process(name, device)]

    return names
