"""The address of a device in a ranktable: an NPU's own on the device network, its host's for any other device."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ranktable_tools.devices.hccn_conf import CONF_PATH
from ranktable_tools.devices.kinds import DeviceKind
from ranktable_tools.devices.npu_addresses import AddressSource, npu_addresses


def has_own_network(kind: DeviceKind) -> bool:
    """Return whether devices of this kind have addresses other than their host's."""
    return kind == "npu"


def card_addresses(
    kind: DeviceKind, device_ids: Sequence[str], host_ip: str, environ: Mapping[str, str], *,
    source: AddressSource | None = None, conf: Path = Path(CONF_PATH),
) -> dict[str, str]:  # fmt: skip
    """Return each device's address. Raises RanktableError if an NPU's cannot be found."""
    if not has_own_network(kind):
        return dict.fromkeys(device_ids, host_ip)
    return npu_addresses(device_ids, source, environ, conf=conf)
