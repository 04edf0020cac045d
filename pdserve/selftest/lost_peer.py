"""Kill the far end in the middle of a hand-off: the sender must notice, and a new link over the transport must work."""

import functools
import time
from collections.abc import Iterator

from devices.interface import Device, Memory
from kvtransfer.sender import KvSender
from kvtransfer.transports import NAMES
from pdserve.selftest import link_pools
from pdserve.selftest.check import LOST_PEER, NotHere, SelftestCheck, Wrong
from pdserve.selftest.far_process import FarProcess, FarProcesses
from pdserve.selftest.links import LinkEvents, hand_over, read_ticket, why_not

_NOTICED_S = 30.0


def lost_peer_checks(device: Device, other: Device, far: FarProcesses) -> Iterator[SelftestCheck]:
    """Yield a check for each transport from the device to `other`."""
    for name in NAMES:
        row = f"{name}, {device.name} to {other.name}"
        yield SelftestCheck(LOST_PEER, row, functools.partial(_check_lost_peer, name, device, other, far))


def _check_lost_peer(name: str, source: Device, target: Device, far: FarProcesses) -> str:
    pool = link_pools.make_pool(source)
    try:
        why = why_not(name, pool, source, target)
        if why is not None:
            raise NotHere(why)
        end = far.of(target.name)
        try:
            why = end.call({"open": name}).get("lacking")
            if why is None:
                seconds = _kill_halfway(name, pool, end)
        finally:
            end.close()  # dead, or of an unknown state
        if why is not None:
            raise NotHere(why)
        next_end = far.of(target.name)
        try:
            next_end.call({"open": name})
            rate = hand_over(name, pool, next_end)
        finally:
            next_end.close()
    finally:
        pool.close()
    return f"noticed after {seconds:.2f} s; then {rate}"


def _kill_halfway(name: str, pool: Memory, end: FarProcess) -> float:
    """Send all layers but the last, kill the far end, and return the seconds until the sender reported it."""
    events, blocks = LinkEvents(), link_pools.deal_blocks(pool.layout, 1)
    link_pools.fill(pool)
    sender = KvSender(
        pool, instance_id="selftest-from", epoch=1, transports=(name,), events=events, progress_age=lambda: 0.0
    )
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
