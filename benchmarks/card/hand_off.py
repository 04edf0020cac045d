"""The hand-off of KV between two processes that share a device, compared with a copy within the device."""

from collections.abc import Iterator
from statistics import median

from benchmarks.card.limits import Limits
from benchmarks.card.rows import Row
from benchmarks.kv.pair import Ours
from benchmarks.kv.shapes import BLOCK_SIZE, MIB, shape_named
from devices.interface import Device

GOAL = 0.80


def measure_hand_off(device: Device, limits: Limits, *, mib: int, rounds: int, judged: bool) -> Iterator[Row]:
    """Yield a row with the digest off, which has the goal, and one with it on; the bytes are checked once each."""
    transport = "shm" if device.traits.pools_on_host else "cuda_ipc"
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
