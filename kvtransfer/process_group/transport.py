"""The process_group transport: a group of two ranks per link, over the collective library of the pool's device."""

from typing import TYPE_CHECKING

from devices.collectives import collective_of
from kvtransfer import tcp
from kvtransfer.device_memory import device_memory
from kvtransfer.hello import Hello
from kvtransfer.interface import PoolMemory
from kvtransfer.process_group.devices import PROCESS_DEVICES, device_of
from kvtransfer.process_group.group_setup import RECEIVER, SENDER, make_group
from kvtransfer.process_group.link_ends import MAX_PAYLOAD_BYTES, OUTLET_BYTES, GroupInlet, GroupOutlet, LinkGroup
from kvtransfer.process_group.remote_group import make_remote_group
from kvtransfer.stream import Stream
from kvtransfer.transport_interface import Timeouts, TransportTraits
from wire.types import KvEndpoint

if TYPE_CHECKING:
    from kvtransfer.process_group.payload import GroupStaging


def _by_default(device: str) -> bool:
    collective = collective_of(device)
    return collective is not None and collective.links_by_default


def _is_slow(device: str) -> bool:
    collective = collective_of(device)
    return collective is not None and collective.make_s > 0.0


class ProcessGroupTransport:
    """Implements transport.Transport; imports torch only when `unusable` is called."""

    traits = TransportTraits(
        "process_group", by_default=_by_default, is_slow=_is_slow, same="collective",
        two_processes=True,  # one thread of a process issues all operations of a card's groups
    )  # fmt: skip

    def __init__(self, memory: PoolMemory) -> None:
        self._memory, self._device = memory, device_of(memory)
        self._collective = collective_of(self._device)
        self._source: str | None = None

    def unusable(self) -> str | None:
        """It needs torch and a collective for the pool's device."""
        collective = self._collective
        if collective is None:
            return f"no collective supports a KV pool on {self._device}"
        lacking = collective.lacking()
        return None if lacking is None else f"{collective.name}: {lacking}"

    def bind(self, host: str | None, source: str | None) -> None:
        """Use `source` as the address of outgoing connections."""
        self._source = source

    def unreachable(self, endpoint: KvEndpoint) -> str | None:
        """Any address may be tried."""
        return None

    def connect(self, endpoint: KvEndpoint, timeouts: Timeouts) -> Stream:
        """Connect to "host:port"."""
        return tcp.connect(endpoint.address, timeouts, self._source)

    def outlet(self, stream: Stream, hello: Hello, timeouts: Timeouts) -> GroupOutlet:
        """Make the group as its rank 0."""
        group, staging = self._make(stream, hello, SENDER, OUTLET_BYTES, timeouts)
        return GroupOutlet(group, staging, stream, timeouts.progress_s)

    def inlet(self, stream: Stream, hello: Hello, timeouts: Timeouts) -> GroupInlet:
        """Make the group as its rank 1. Raises Unavailable with the values that differ."""
        group, staging = self._make(stream, hello, RECEIVER, MAX_PAYLOAD_BYTES, timeouts)
        return GroupInlet(group, staging, stream, timeouts.progress_s, digests=hello.digests)

    def _make(
        self, stream: Stream, hello: Hello, rank: int, staging_bytes: int, timeouts: Timeouts
    ) -> "tuple[LinkGroup, GroupStaging]":
        from kvtransfer.process_group.payload import make_staging

        collective, pool = self._collective, device_memory(self._memory)
        assert collective is not None, "an unusable transport is not offered"
        where = self._device if pool is None else str(pool.tensor.device)
        if collective.own_process:
            memory_of = "cpu" if collective.on_host else where
            return make_remote_group(
                stream, hello, rank, collective, self._device, (memory_of, staging_bytes), timeouts
            )
        staging = make_staging(where, staging_bytes, on_host=collective.on_host)
        lease = PROCESS_DEVICES.lease(self._memory)
        return make_group(stream, hello, rank, collective, lease, staging, timeouts), staging
