"""Find the addresses of NPUs on the device network: from hccn_tool (-ip or -vnic) or /etc/hccn.conf."""

from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Literal, get_args

from ranktable_tools.devices.hccn_answers import parse_address
from ranktable_tools.devices.hccn_conf import CONF_PATH, parse_conf
from ranktable_tools.devices.tools import Run, find_tool, run_tool
from ranktable_tools.errors import RanktableError

AddressSource = Literal["ip", "vnic", "conf"]
SOURCES: tuple[AddressSource, ...] = get_args(AddressSource)


def npu_addresses(
    device_ids: Sequence[str],
    source: AddressSource | None,
    environ: Mapping[str, str],
    *,
    run: Run = run_tool,
    conf: Path = Path(CONF_PATH),
) -> dict[str, str]:
    """Return each device's address. Without a `source`, hccn_tool is run if installed, else /etc/hccn.conf is read.

    Raises RanktableError naming the device, the command or file, and its output.
    """
    tool = None if source == "conf" else find_tool("hccn_tool", environ)
    if tool is not None:
        found = _query(tool, device_ids, source or "ip", run)
    elif source in (None, "conf"):
        found = _read(conf, device_ids, is_requested=source == "conf")
    else:
        raise RanktableError("hccn_tool is not found: set HCCN_TOOL_PATH, or choose --device-ip-from conf")
    _check(found)
    return found


def _query(tool: str, device_ids: Sequence[str], source: str, run: Run) -> dict[str, str]:
    """Query one device after another: hccn_tool does not support concurrent calls."""
    found: dict[str, str] = {}
    for device_id in device_ids:
        answer = run((tool, "-i", device_id, f"-{source}", "-g"))
        address = parse_address(answer.text)
        if address is None:
            raise RanktableError(f"device {device_id}: {' '.join(answer.command)} printed: {answer.summary}; {_OTHERS}")
        found[device_id] = address
    return found


_OTHERS = "other sources: --device-ip-from vnic (an A3 pod) or conf (/etc/hccn.conf), --device-type cpu"


def _read(conf: Path, device_ids: Sequence[str], *, is_requested: bool) -> dict[str, str]:
    try:
        known = parse_conf(conf.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        missing = "" if is_requested else "hccn_tool is not found (set HCCN_TOOL_PATH) and "
        raise RanktableError(
            f"{missing}{conf} cannot be read: {error.strerror}; mount {conf if is_requested else 'either of them'}, or "
            "choose a --device-type other than npu"
        ) from error
    absent = [device_id for device_id in device_ids if device_id not in known]
    if absent:
        listed = ",".join(sorted(known, key=int)) or "none"
        raise RanktableError(f"{conf} has no address_{absent[0]}; devices with an address: {listed}")
    return {device_id: known[device_id] for device_id in device_ids}


def _check(found: Mapping[str, str]) -> None:
    """Reject two devices with one address, and a mix of IPv4 and IPv6, which HCCL rejects at its start (EI0001)."""
    first_by_address: dict[str, str] = {}
    for device_id, address in found.items():
        first = first_by_address.setdefault(address, device_id)
        if first != device_id:
            raise RanktableError(f"device {device_id}: device_ip {address} is also that of device {first}")
    versions = {ip_address(address).version: device_id for device_id, address in found.items()}
    if len(versions) > 1:
        raise RanktableError(
            f"device {versions[4]} has the IPv4 address {found[versions[4]]}, but device {versions[6]} has "
            f"the IPv6 address {found[versions[6]]}: HCCL supports only one family"
        )
