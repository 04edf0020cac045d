"""The addresses of the benchmark's instances, on which both ends must agree."""

from wire.types import Role

HOST = "127.0.0.1"
ROLES = (Role.PREFILL, Role.DECODE)
DEVICE_IDS = {Role.PREFILL: ("0",), Role.DECODE: ("1",)}
