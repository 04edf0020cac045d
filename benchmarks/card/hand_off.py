"""The hand-off of KV between two processes that share a device, compared with a copy within the device."""

from collections.abc import Iterator
from statistics import median

from benchmarks.card.limits import Limits
from benchmarks.card.rows import Row
from benchmarks.kv.pair import Ours
from benchmarks.kv.shapes import BLOCK_SIZE, MIB, shape_named
from devices.interface import Device
from kvtransfer.transport_table import make_transports
from pdserve.selftest import link_pools

GOAL = 0.80


def measure_hand_off(
    device: Device, limits: Limits, transport: str | None, *, mib: int, rounds: int, judged: bool
) -> Iterator[Row]:  # fmt: skip
    """Yield a row with the digest off, to which the goal applies, and one with the digest on; both check the bytes."""
    transport = transport or best_transport(device)
    shape = shape_named("default")
    num_bytes = shape.tokens_of(mib * MIB) * shape.token_bytes
    blocks = -(-shape.tokens_of(num_bytes) // BLOCK_SIZE)
    for digest in (False, True):
        with Ours(transport, shape, blocks, digest=digest, device=device.traits.kind) as pair:
            pair.move(num_bytes, verify=True)
            seconds = median(pair.move(num_bytes) for _ in range(rounds))
        yield Row(
            f"hand-off of {num_bytes / MIB:.0f} MiB by {transport}, digest {'on' if digest else 'off'}", "pdserve",
            num_bytes / seconds / 1e9, "GB/s", limits.copied_bytes_s / 1e9, "a copy within the device",
            GOAL if judged and not digest else None, f"{seconds * 1e3:.4g} ms, first put to ack",
        )  # fmt: skip


def best_transport(device: Device) -> str:
    """Return the best transport between processes that share this device.

    Collective transports are skipped: they need one device per process.
    """
    pool = link_pools.make_pool(device)
    try:
        traits = [transport.traits for transport in make_transports((), pool)]
    finally:
        pool.close()
    return next(one.name for one in traits if one.same != "collective")
