"""Kill the receiver during a hand-off: the sender must notice, and a new link over the transport must work."""

import functools
import time
from collections.abc import Iterator

from devices.interface import Device, Memory
from kvtransfer.transport_table import NAMES
from pdserve.selftest import link_pools
from pdserve.selftest.check import LOST_PEER, SelftestCheck, Wrong
from pdserve.selftest.far_process import FarProcess, FarProcesses
from pdserve.selftest.links import LinkEvents, hand_over, make_sender, open_link, read_ticket

_NOTICED_S = 30.0


def lost_peer_checks(device: Device, other: Device, far: FarProcesses) -> Iterator[SelftestCheck]:
    """Yield a check for each transport from the device to `other`."""
    for name in NAMES:
        row = f"{name}, {device.name} to {other.name}"
        yield SelftestCheck(LOST_PEER, row, functools.partial(_check_lost_peer, name, device, other, far))


def _check_lost_peer(name: str, source: Device, target: Device, far: FarProcesses) -> str:
    with open_link(name, source, target, far) as (pool, end):
        try:
            seconds = _kill_halfway(name, pool, end)
        finally:
            end.close()  # dead, or in an unknown state
        next_end = far.of(target.name)
        try:
            next_end.call({"open": name})
            rate = hand_over(name, pool, next_end)
        finally:
            next_end.close()
    return f"noticed after {seconds:.2f} s; then {rate}"


def _kill_halfway(name: str, pool: Memory, end: FarProcess) -> float:
    """Send all layers but the last, kill the receiver, and return the seconds until the sender reported it."""
    events, blocks = LinkEvents(), link_pools.deal_blocks(pool.layout, 1)
    link_pools.fill(pool)
    sender = make_sender(name, pool, events)
    try:
        ticket = read_ticket(end.call({"expect": 2})["ticket"])
        sender.begin(ticket)
        *layers, last = range(pool.layout.num_layers)
        for layer in layers:
            sender.put(ticket.ticket_id, layer, 0, link_pools.NUM_TOKENS, blocks)
        deadline = time.monotonic() + link_pools.SET_UP_S
        while not end.call({"received": True})["bytes"]:
            if events.error is not None or time.monotonic() > deadline:
                raise Wrong(events.error or f"nothing arrived within {link_pools.SET_UP_S:g} s")
        end.kill()
        began = time.monotonic()
        sender.put(ticket.ticket_id, last, 0, link_pools.NUM_TOKENS, blocks)
        sender.commit(ticket.ticket_id, b"selftest")
        events.wait_lost(_NOTICED_S)
        return time.monotonic() - began
    finally:
        sender.close()
