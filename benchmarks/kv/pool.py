"""A pool with every page touched and distinguishable bytes, and the digest that a moved prompt must have."""

import random
from typing import Any

import xxhash

from devices.interface import Memory
from devices.table import find_kind
from wire.kv_layout import PoolLayout

_PAGE_BYTES = 1 << 20
_page = random.Random(3).randbytes(_PAGE_BYTES - 8)


def touched_pool(layout: PoolLayout, device: str = "cpu") -> Memory:
    """Return a pool of zeros on a device of this kind, with all its memory allocated."""
    opened = find_kind(device).open()
    opened.activate()
    pool = opened.make_pool(layout)
    fill(pool, None)
    return pool


def fill(pool: Memory, seed: int | None) -> None:
    """Write pages that differ by number and seed over the whole pool; zeros for None."""
    tensor = getattr(pool, "tensor", None)
    if tensor is None:
        _write_pages(pool.buffer, seed)
        return
    import torch

    pages = bytearray(tensor.numel())
    _write_pages(memoryview(pages), seed)
    tensor.copy_(torch.frombuffer(pages, dtype=torch.uint8))  # synchronous


def _write_pages(buffer: memoryview, seed: int | None) -> None:
    size = len(buffer)
    for number in range(-(-size // _PAGE_BYTES)):
        page = bytes(_PAGE_BYTES) if seed is None else (seed << 40 | number).to_bytes(8, "little") + _page
        at = number * _PAGE_BYTES
        count = min(_PAGE_BYTES, size - at)
        buffer[at : at + count] = page[:count]


def expected_digest(pool: Memory, blocks: tuple[int, ...], num_tokens: int) -> str:
    """Return xxh3-128 of the prompt's tokens in these blocks, tensor after tensor, without kvtransfer's code."""
    hasher, tensor_of_bytes = xxhash.xxh3_128(), getattr(pool, "tensor", None)
    buffer: Any = pool.buffer if tensor_of_bytes is None else memoryview(tensor_of_bytes.cpu().numpy())
    for tensor in range(len(pool.layout.tensors)):
        for run in pool.layout.runs(tensor, blocks, 0, num_tokens):
            hasher.update(buffer[run.offset : run.offset + run.length])
    return str(hasher.hexdigest())
