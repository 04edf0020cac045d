"""Check the versions of driver, firmware and CANN against the guide and torch_npu's requirements."""

import importlib.metadata
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ranktable_tools.devices.npu_smi import parse_fields, parse_states
from ranktable_tools.doctor.case import DoctorInput
from ranktable_tools.doctor.machine import Machine
from ranktable_tools.doctor.verdict import Verdict, combined, fail, not_here

GUIDE_DRIVER = "23.0.6"
# Our kernels have the signatures of torch_npu 2.10, which needs CANN 9.0. According to Huawei's release notes, even
# CANN 8.5.0 needs Ascend HDK 25.0 or later.
MIN_TORCH_NPU = "2.10"
MIN_CANN = "9.0"
MIN_DRIVER = "25.0"
_UPGRADE = f"install Ascend HDK {MIN_DRIVER} or later (driver and firmware)"
_DRIVER_INFO = "/usr/local/Ascend/driver/version.info"
_CANN_HOMES = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann")
_INSTALLED = re.compile(r"^version\s*=\s*(\S+)", re.MULTILINE)
# The version of a single component differs from CANN's.
_CANN_FILES = (
    ("ascend_toolkit_install.info", _INSTALLED),
    (f"{platform.machine()}-linux/ascend_toolkit_install.info", _INSTALLED),
    ("version.cfg", re.compile(r"^\w*running_version\s*=\s*\[[^:\]\n]*:([^\]\n]+)\]", re.MULTILINE)),
    ("runtime/version.info", re.compile(r"^version_dir\s*=\s*(\S+)", re.MULTILINE)),
)
_NUMBERS = re.compile(r"[0-9]+(?:\.[0-9]+)*")
_RANGE = re.compile(r"\[([0-9.]+),\s*([0-9.]+)\]")


@dataclass(frozen=True, slots=True)
class Versions:
    """The installed versions; None if not found. `firmware_range` is what the driver supports, inclusive."""

    driver: str | None
    firmware: str | None
    firmware_range: tuple[str, str] | None
    cann: str | None
    torch_npu: str | None


def check_versions(case: DoctorInput) -> Verdict:
    """Check that driver, firmware, CANN and torch_npu are compatible."""
    if case.machine.kind != "npu":
        return not_here("no NPU on this machine")
    found = find_versions(case.machine)
    shown = (
        f"driver {found.driver or '-'}, firmware {found.firmware or '-'}, CANN {found.cann or '-'}, "
        f"torch_npu {found.torch_npu or '-'}"
    )
    problems = [*_check_driver(found), *_check_firmware(found), *_check_cann(found), *_torch_npu(found)]
    return combined(problems, shown)


def find_versions(machine: Machine, installed: Callable[[str], str | None] | None = None) -> Versions:
    """Return the versions on this machine; `installed` returns the version of a Python package."""
    info = dict(_key_values(machine.text(_DRIVER_INFO) or ""))
    board = _read_board(machine)
    found = _RANGE.search(info.get("compatible_version_fw", ""))
    return Versions(
        driver=info.get("version") or board.get("Software Version"),
        firmware=board.get("Firmware Version"),
        firmware_range=(found[1], found[2]) if found else None,
        cann=find_cann(machine),
        torch_npu=(installed or package_version)("torch_npu"),
    )


def stack_facts(machine: Machine) -> dict[str, str]:
    """Return the versions of torch_npu's software stack by name, for display; empty on a machine without NPUs."""
    if machine.kind != "npu":
        return {}
    found = find_versions(machine)
    return {"driver": found.driver or "-", "firmware": found.firmware or "-", "CANN": found.cann or "-"}


def find_cann(machine: Machine) -> str | None:
    """Return the version in the toolkit's files, such as 9.1.0 or 8.0.RC1."""
    named = machine.environ.get("ASCEND_HOME_PATH") or machine.environ.get("ASCEND_TOOLKIT_HOME")
    for home in (named,) if named else _CANN_HOMES:
        for file, pattern in _CANN_FILES:
            match = pattern.search(machine.text(f"{home}/{file}") or "")
            if match:
                return match[1]
    return None


def package_version(name: str) -> str | None:
    """Return the version of an installed package without importing it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (24, 1) for 24.1.rc1, (7, 1, 0, 7, 220) for 7.1.0.7.220."""
    match = _NUMBERS.match(version)
    return tuple(int(word) for word in match[0].split(".")) if match else ()


def is_older(version: str, limit: str) -> bool:
    """Return whether a version is below a limit, comparing as many numbers as the limit has."""
    wanted = numbers(limit)
    return numbers(version)[: len(wanted)] < wanted


def _is_newer(version: str, limit: str) -> bool:
    wanted = numbers(limit)
    return numbers(version)[: len(wanted)] > wanted


def _check_driver(found: Versions) -> Sequence[Verdict]:
    if found.driver is None:
        return [fail(f"no driver version in {_DRIVER_INFO} or from npu-smi", "install or mount the driver")]
    if is_older(found.driver, GUIDE_DRIVER):
        return [fail(f"driver {found.driver} is older than the guide's {GUIDE_DRIVER}", _UPGRADE)]
    if is_older(found.driver, MIN_DRIVER) and found.torch_npu is not None:
        message = f"driver {found.driver} suits the guide, but torch_npu {found.torch_npu} needs {MIN_DRIVER} or later"
        return [fail(message, _UPGRADE)]
    return []


def _check_firmware(found: Versions) -> Sequence[Verdict]:
    if found.firmware is None or found.firmware_range is None:
        return []
    lowest, highest = found.firmware_range
    if not is_older(found.firmware, lowest) and not _is_newer(found.firmware, highest):
        return []
    message = f"firmware {found.firmware} is not in {lowest} to {highest}, which driver {found.driver} supports"
    return [fail(message, "install the firmware of the driver's own release")]


def _check_cann(found: Versions) -> Sequence[Verdict]:
    step = f"install CANN {MIN_CANN} or later and source its set_env.sh"
    if found.cann is None:
        return [fail("CANN is not found", step)]
    if is_older(found.cann, MIN_CANN):
        return [fail(f"CANN {found.cann} is older than {MIN_CANN}, which torch_npu {MIN_TORCH_NPU} needs", step)]
    return []


def _torch_npu(found: Versions) -> Sequence[Verdict]:
    step = f"pip install 'torch_npu>={MIN_TORCH_NPU}' in the NPU environment"
    if found.torch_npu is None:
        return [fail("torch_npu is not installed in this Python", step)]
    if is_older(found.torch_npu, MIN_TORCH_NPU):
        return [fail(f"torch_npu {found.torch_npu} is older than {MIN_TORCH_NPU}", step)]
    return []


def _read_board(machine: Machine) -> dict[str, str]:
    listed = machine.run_tool("npu-smi", "info")
    first = next(iter(parse_states(listed.text)), None) if listed is not None else None
    answer = None if first is None else machine.run_tool("npu-smi", "info", "-t", "board", "-i", str(first.npu_id))
    return {} if answer is None else dict(parse_fields(answer.text))


def _key_values(text: str) -> list[tuple[str, str]]:
    pairs = [line.partition("=") for line in text.splitlines()]
    return [(key.strip().lower(), value.strip()) for key, equals, value in pairs if equals]
