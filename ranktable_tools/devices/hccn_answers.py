"""Parse the output of hccn_tool: addresses, link, health, TLS switch, pings. Pure."""

import re

from ranktable_tools.addresses import is_address

_TLS = re.compile(r"tls switch\[([01])\]")
_RECEIVED = re.compile(r"([0-9]{1,9}) packets transmitted, ([0-9]{1,9}) received")


def parse_address(text: str) -> str | None:
    """Return the address in the output of `-ip -g` or `-vnic -g`; None for any other output."""
    address = _value(text, "ipaddr") or _value(text, "vnic ipaddr")
    return address if address and is_address(address) else None


def parse_link(text: str) -> str | None:
    """Return UP or DOWN from the output of `-link -g`."""
    status = _value(text, "link status")
    return status.upper() if status else None


def parse_net_health(text: str) -> str | None:
    """Return the status from the output of `-net_health -g`, such as Success, Init or Unreachable."""
    return _value(text, "net health status")


def parse_tls_switch(text: str) -> str | None:
    """Return "0" (off) or "1" (on) from the output of `-tls -g`."""
    match = _TLS.search(text)
    return match[1] if match else None


def parse_ping(text: str) -> bool:
    """Return whether `-ping -g address X` or `-hccs_ping -g address X` reached the other device at least once."""
    match = _RECEIVED.search(text)
    return int(match[2]) > 0 if match else "This pkt ping success!" in text


def _value(text: str, wanted: str) -> str | None:
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon and name.strip().lower() == wanted:
            return value.strip() or None
    return None
