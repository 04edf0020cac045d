"""What each library of collectives is told in the environment so that it takes one interface. Imports no torch."""

from collections.abc import Callable, Mapping

_VARIABLES: Mapping[str, Callable[[str, str], dict[str, str]]] = {
    "gloo": lambda address, interface: {"GLOO_SOCKET_IFNAME": interface},
    "nccl": lambda address, interface: {"NCCL_SOCKET_IFNAME": f"={interface}"},
    "hccl": lambda address, interface: {"HCCL_IF_IP": address, "HCCL_SOCKET_IFNAME": f"={interface}"},
}
"""By Traits.collective; `=` is the exact name, where the library would take a prefix."""


def interface_variables(collective: str, address: str, interface: str) -> dict[str, str]:
    """Return what gloo, which CPU pools use beside any device, and a device's own collectives are told."""
    variables: dict[str, str] = {}
    for name in ("gloo", collective):
        variables |= _VARIABLES[name](address, interface) if name in _VARIABLES else {}
    return variables
