"""Find a container's devices: those listed by a device plugin, else those with a device node."""

import re
from collections.abc import Mapping
from pathlib import Path

from ranktable_tools.devices.kinds import DeviceKind, present_devices
from ranktable_tools.errors import RanktableError

_VISIBLE = {"npu": "ASCEND_VISIBLE_DEVICES", "cuda": "NVIDIA_VISIBLE_DEVICES"}
# 4,5 or Ascend910-4,Ascend910-5.
_NUMBERED = re.compile(r"(?:[A-Za-z0-9]+-)?([0-9]{1,9})")


def own_device_ids(kind: DeviceKind, count: int, environ: Mapping[str, str], dev: Path = Path("/dev")) -> list[str]:
    """Return `count` device ids, physical ones on NPU and GPU. Raises RanktableError naming both numbers.

    On CPUs a device is a share of the cores and has no node: ids count from 0.
    """
    if count < 1:
        raise RanktableError(f"--num-devices is {count}, but must be at least 1")
    if kind == "cpu":
        return [str(number) for number in range(count)]
    present, named = list(present_devices(kind, dev)), _parse_ids(environ.get(_VISIBLE[kind], ""))
    found = named if named and len(named) == count else present
    if len(found) == count:
        return found
    raise RanktableError(
        f"--num-devices is {count}, but the number of {kind} devices in {dev} of this container is {len(present)} "
        f"({','.join(present) or 'none'}), and {_VISIBLE[kind]} is {environ.get(_VISIBLE[kind], '')!r}: request "
        f"{count} in the pod's resources"
    )


def _parse_ids(value: str) -> list[str]:
    matches = [_NUMBERED.fullmatch(word.strip()) for word in value.split(",")]
    return [match[1] for match in matches if match] if all(matches) else []
