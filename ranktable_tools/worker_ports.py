"""The ports at which a worker of another engine offers its KV: derived from its entry, so every host can compute them.

vllm          NixlConnector: VLLM_NIXL_SIDE_CHANNEL_PORT + data-parallel rank (NixlBaseConnectorScheduler)
vllm-ascend   MooncakeConnectorV1: kv_port + number of the NPU in the instance (MooncakeConnectorWorker)

Each device_id has its own 16 ports; an entry uses those of its lowest device, starting with the first.
"""

from collections.abc import Mapping
from typing import Final

from ranktable_tools.tables import TableServer, WorkerKind

# Below the ports that Linux gives outgoing connections (from 32768) and those of Mooncake on NPUs (from 20000).
_FIRST: Final[Mapping[WorkerKind, int]] = {"vllm": 5600, "vllm-ascend": 18000}
_STRIDE, _NUM_PLACES = 16, 120
PORT_NAMES: Final[Mapping[WorkerKind, str]] = {"vllm": "VLLM_NIXL_SIDE_CHANNEL_PORT", "vllm-ascend": "kv_port"}


def kv_ports(server: TableServer, first: int | None = None) -> range:
    """Return the KV ports of a worker, one for each device; `first` overrides the derived one."""
    if server.worker is None or not server.devices:
        return range(0)
    place = min(int(device_id) for device_id in server.device_ids) % _NUM_PLACES
    start = _FIRST[server.worker] + place * _STRIDE if first is None else first
    return range(start, start + len(server.devices))
