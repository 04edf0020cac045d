"""A pool with every page touched and bytes that can be told apart, and the digest that a moved prompt must have."""

import random

import xxhash

from devices.host_pool import HostPool
from wire.kv_layout import PoolLayout

_PAGE_BYTES = 1 << 20
_page = random.Random(3).randbytes(_PAGE_BYTES - 8)


def touched_pool(layout: PoolLayout) -> HostPool:
    """Return a pool of zeros whose memory is there already."""
    pool = HostPool(layout)
    fill(pool, None)
    return pool


def fill(pool: HostPool, seed: int | None) -> None:
    """Write pages that differ by number and seed over the whole pool; zeros for None."""
    size = len(pool.buffer)
    for number in range(-(-size // _PAGE_BYTES)):
        page = bytes(_PAGE_BYTES) if seed is None else (seed << 40 | number).to_bytes(8, "little") + _page
        at = number * _PAGE_BYTES
        count = min(_PAGE_BYTES, size - at)
        pool.buffer[at : at + count] = page[:count]


def expected_digest(pool: HostPool, blocks: tuple[int, ...], num_tokens: int) -> str:
    """Return xxh3-128 of the prompt's tokens in these blocks, tensor after tensor, apart from kvtransfer's own code."""
    hasher = xxhash.xxh3_128()
    for tensor in range(len(pool.layout.tensors)):
        for run in pool.layout.runs(tensor, blocks, 0, num_tokens):
            hasher.update(pool.buffer[run.offset : run.offset + run.length])
    return str(hasher.hexdigest())
