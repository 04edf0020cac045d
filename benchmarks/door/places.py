"""Where the benchmark's instances stand: what both ends of the wire have to agree on."""

from wire.types import Role

HOST = "127.0.0.1"
ROLES = (Role.PREFILL, Role.DECODE)
DEVICE_IDS = {Role.PREFILL: ("0",), Role.DECODE: ("1",)}
