"""Send a few MB of KV over each transport, from the device to another card, to the CPU and back; compare all bytes.

The sender is in this process and the receiver in a child (far_end.py), as prefill and decode instances are. The other
card is the next visible one, or the same if it is the only one.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

from devices.interface import Device, Memory
from kvtransfer.interface import SendStats
from kvtransfer.sender import KvSender
from kvtransfer.transport_table import NAMES, TRAITS, mismatch
from pdserve.selftest import link_pools
from pdserve.selftest.check import NotHere, SelftestCheck, Wrong
from pdserve.selftest.far_process import FarProcess, FarProcesses
from wire.errors import PdserveError
from wire.types import KvEndpoint, Ticket

_DEADLINE_S = link_pools.SET_UP_S


def link_checks(device: Device, other: Device, host: Device, far: FarProcesses) -> Iterator[SelftestCheck]:
    """Yield a check for each transport and device pair; `host` is the CPU."""
    pairs = [(device, other)]
    if not device.traits.pools_on_host:
        pairs += [(device, host), (host, device)]
    for source, target in pairs:
        for name in NAMES:
            row = f"{name}, {source.name} to {target.name}"
            yield SelftestCheck("links", row, functools.partial(_send, name, source, target, far))


def works_in_one_process(name: str, device: Device) -> bool:
    """Return whether both ends of this transport may be in one process, on one device."""
    return device.traits.pools_on_host or not TRAITS[name].two_processes


def _send(name: str, source: Device, target: Device, far: FarProcesses) -> str:
    with open_link(name, source, target, far) as (pool, end):
        remark = hand_over(name, pool, end)
        end.call({"shut": True})
        return remark


@contextlib.contextmanager
def open_link(
    name: str, source: Device, target: Device, far: FarProcesses
) -> Iterator[tuple[Memory, FarProcess]]:  # fmt: skip
    """Yield a pool on `source`, and the receiver on `target` with the transport open. Raises NotHere if it cannot run.

    After an error the receiver is closed: its state is unknown, and the next row gets a new child.
    """
    pool = link_pools.make_pool(source)
    try:
        on_one_card = source.name == target.name
        why = link_pools.lacking(name, source, pool) or mismatch(
            name, source.traits, target.traits, on_one_card=on_one_card
        )
        if why is not None:
            raise NotHere(why)
        end = far.of(target.name)
        try:
            why = end.call({"open": name}).get("lacking")
            if why is None:
                yield pool, end
        except BaseException:
            end.close()
            raise
        if why is not None:
            raise NotHere(why)
    finally:
        pool.close()


def hand_over(name: str, pool: Memory, end: FarProcess) -> str:
    """Send the tokens twice, to different blocks: the first time includes connecting and allocating memory."""
    events, blocks = LinkEvents(), link_pools.deal_blocks(pool.layout, 1)
    sent = link_pools.digests(link_pools.fill(pool), pool.layout, blocks)
    sender = make_sender(name, pool, events)
    try:
        for seed in (2, 3):
            ticket = read_ticket(end.call({"expect": seed})["ticket"])
            sender.begin(ticket)
            for layer in range(pool.layout.num_layers):
                sender.put(ticket.ticket_id, layer, 0, link_pools.NUM_TOKENS, blocks)
            sender.commit(ticket.ticket_id, b"selftest")
            stats = events.wait()
            arrived = end.call({"digests": seed})["digests"]
            wrong = [tensor for tensor, digest in enumerate(sent) if arrived[tensor] != digest]
            if wrong:
                raise Wrong(f"the received bytes of tensor {wrong[0]} differ from those sent, but no digest showed it")
    finally:
        sender.close()
    return f"{stats.kv_bytes / 1e6:.1f} MB, {stats.kv_bytes / max(stats.seconds, 1e-9) / 1e9:.2f} GB/s"


def make_sender(name: str, pool: Memory, events: "LinkEvents") -> KvSender:
    """Return a sender over this transport alone."""
    return KvSender(
        pool, instance_id="selftest-from", epoch=1, transports=(name,), events=events, progress_age=lambda: 0.0
    )


def read_ticket(fields: dict[str, Any]) -> Ticket:
    return Ticket(**{**fields, "endpoints": tuple(KvEndpoint(**endpoint) for endpoint in fields["endpoints"])})


class LinkEvents:
    """Waits for the outcome of one ticket after another; implements SenderEvents."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._stats: SendStats | None = None
        self._error: str | None = None

    @property
    def error(self) -> str | None:
        """Why the ticket failed, if it has."""
        return self._error

    def wait(self) -> SendStats:
        """Return the sender's statistics. Raises Wrong with the reason if the ticket failed."""
        if not self._done.wait(_DEADLINE_S):
            raise Wrong(f"the ticket was not finished within {_DEADLINE_S:g} s")
        if self._stats is None:
            raise Wrong(self._error or "the ticket ended")
        stats, self._stats = self._stats, None
        self._done.clear()
        return stats

    def wait_lost(self, within_s: float) -> str:
        """Return why the ticket failed. Raises Wrong if it was finished, or has not failed in time."""
        if not self._done.wait(within_s):
            raise Wrong(f"the loss of the peer was not noticed within {within_s:g} s")
        if self._error is None:
            raise Wrong("the ticket was finished although its peer was killed")
        return self._error

    def acked(self, ticket_id: str, stats: SendStats) -> None:
        """Record the statistics of a received prompt."""
        self._stats = stats
        self._done.set()

    def failed(self, ticket_id: str, error: PdserveError) -> None:
        """Record the error."""
        self._error = str(error)
        self._done.set()
