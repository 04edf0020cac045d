"""Which address a device has in a ranktable: an NPU one of its own network, any other its host's."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ranktable_tools.devices.hccn_conf import CONF_PATH
from ranktable_tools.devices.kinds import DeviceKind
from ranktable_tools.devices.npu_addresses import AddressSource, npu_addresses


def has_own_network(kind: DeviceKind) -> bool:
    """Whether devices of this kind have addresses that are not their host's."""
    return kind == "npu"


def card_addresses(
    kind: DeviceKind, device_ids: Sequence[str], host_ip: str, environ: Mapping[str, str], *,
    source: AddressSource | None = None, conf: Path = Path(CONF_PATH),
) -> dict[str, str]:  # fmt: skip
    """Return each device's address. Raises RanktableError where an NPU's is not to be found."""
    if not has_own_network(kind):
        return dict.fromkeys(device_ids, host_ip)
    return npu_addresses(device_ids, source, environ, conf=conf)
