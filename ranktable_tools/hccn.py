"""Ask Ascend's hccn_tool for the device network addresses, and read its answers."""

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ranktable_tools.addresses import host_problem
from ranktable_tools.errors import RanktableError

_PLACES = ("/usr/local/Ascend/driver/tools/hccn_tool", "/usr/bin/hccn_tool")
_TIMEOUT_S = 30.0

Run = Callable[[Sequence[str]], str]


def find_hccn_tool(environ: Mapping[str, str]) -> str | None:
    """Return the path of hccn_tool: HCCN_TOOL_PATH, else where the driver puts it, else None."""
    named = environ.get("HCCN_TOOL_PATH")
    if named:
        return named
    return next((place for place in _PLACES if os.access(place, os.X_OK)), None)


def run_tool(command: Sequence[str]) -> str:
    """Run one command to its end and return what it says. The tool answers errors in words, with a non-zero status."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise RanktableError(f"{' '.join(command)}: no answer within {_TIMEOUT_S:g} s") from error
    except OSError as error:
        raise RanktableError(f"{' '.join(command)}: cannot be run: {error.strerror}") from error
    return done.stdout + done.stderr


def device_addresses(tool: str, device_ids: Sequence[str], run: Run = run_tool) -> dict[str, str]:
    """Return each device's address. The tool is called for one device after the other: it does not bear more."""
    addresses: dict[str, str] = {}
    for device_id in device_ids:
        command = (tool, "-i", device_id, "-ip", "-g")
        address = parse_address(run(command), f"device {device_id}: {' '.join(command)}")
        twin = next((other for other, known in addresses.items() if known == address), None)
        if twin is not None:
            raise RanktableError(f"device {device_id}: device_ip {address} is also that of device {twin}")
        addresses[device_id] = address
    return addresses


def parse_address(answer: str, source: str) -> str:
    """Return the address in the answer to `hccn_tool -i N -ip -g`. Raises RanktableError with the tool's own words."""
    for line in answer.splitlines():
        name, colon, value = line.partition(":")
        if colon and name.strip() == "ipaddr":
            address = value.strip()
            if address and host_problem(address) is None:
                return address
    said = " ".join(answer.split()) or "nothing"
    raise RanktableError(f"{source} said: {said[:200]}")


def default_device_type(environ: Mapping[str, str], dev: Path = Path("/dev")) -> str:
    """Return `npu` where hccn_tool and an NPU are present, else `cpu`."""
    return "npu" if find_hccn_tool(environ) is not None and any(dev.glob("davinci[0-9]*")) else "cpu"
