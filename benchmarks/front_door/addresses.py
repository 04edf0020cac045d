"""The host, roles and device ids of the benchmark's instances, shared by the instances and the scheduler."""

from wire.types import Role

HOST = "127.0.0.1"
ROLES = (Role.PREFILL, Role.DECODE)
DEVICE_IDS = {Role.PREFILL: ("0",), Role.DECODE: ("1",)}
