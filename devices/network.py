"""Environment variables that restrict each collective library to one network interface. Imports no torch."""

from collections.abc import Callable, Mapping

_VARIABLES: Mapping[str, Callable[[str, str], dict[str, str]]] = {
    "gloo": lambda address, interface: {"GLOO_SOCKET_IFNAME": interface},
    "nccl": lambda address, interface: {"NCCL_SOCKET_IFNAME": f"={interface}"},
    "hccl": lambda address, interface: {"HCCL_IF_IP": address, "HCCL_SOCKET_IFNAME": f"={interface}"},
}
"""The variables of each Traits.collective. `=` means the exact name; without it the library matches a prefix."""


def interface_variables(collective: str, address: str, interface: str) -> dict[str, str]:
    """Return the variables for a device's collective library and for gloo, which CPU pools use with any device."""
    variables: dict[str, str] = {}
    for name in ("gloo", collective):
        variables |= _VARIABLES[name](address, interface) if name in _VARIABLES else {}
    return variables
