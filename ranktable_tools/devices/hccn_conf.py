"""Parse /etc/hccn.conf: the configured device addresses, for containers without hccn_tool."""

import re
from collections.abc import Mapping

from ranktable_tools.addresses import is_address

CONF_PATH = "/etc/hccn.conf"
_LINE = re.compile(r"(address|IPv6address)_([0-9]{1,9})")


def parse_conf(text: str) -> Mapping[str, str]:
    """Return each device's address: `address_N`, else `IPv6address_N`. Other keys and empty lines are ignored."""
    found: dict[tuple[str, str], str] = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        match = _LINE.fullmatch(name.strip())
        address = value.strip().partition("/")[0]
        if equals and match and address and is_address(address):
            found[match[1], str(int(match[2]))] = address
    older = {device_id: address for (key, device_id), address in found.items() if key == "address"}
    newer = {device_id: address for (key, device_id), address in found.items() if key == "IPv6address"}
    return {**newer, **older}
