"""The pools at both ends of a link under test: filled from a seed, read back as a digest of each tensor.

Each end has its device's block size and random block order. torch is imported only for pools on devices.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from devices.collectives import COLLECTIVES
from devices.interface import Device, Memory
from kvtransfer.device_memory import device_memory
from kvtransfer.transport_table import make_transports
from wire.errors import ConfigError
from wire.kv_layout import KvTensor, PoolLayout

NUM_TOKENS = 700
"""5.7 MB, not a whole number of blocks."""
SET_UP_S = 20.0 + max(one.make_s for one in COLLECTIVES.values())
"""Time limit for setting up a link and sending the tokens."""
_TENSORS = tuple(KvTensor(layer, name, 8, 64, "float16") for layer in range(4) for name in ("k", "v"))
Bytes = npt.NDArray[np.uint8]


def make_pool(device: Device) -> Memory:
    """Return a pool with a few blocks more than the tokens need. Raises ConfigError if it does not fit."""
    size = device.traits.block_size
    return device.make_pool(PoolLayout(_TENSORS, num_blocks=-(-NUM_TOKENS // size) + 5, block_size=size))


def lacking(transport: str, device: Device, pool: Memory) -> str | None:
    """Return why the transport cannot be used with this pool, in a message with the device, or None."""
    try:
        make_transports((transport,), pool)
    except ConfigError as error:
        return f"{device.name}: {str(error).removeprefix(f'--kv-transport {transport}: ')}"
    return None


def deal_blocks(layout: PoolLayout, seed: int) -> list[int]:
    """Return random blocks for the tokens, in token order."""
    dealt = np.random.default_rng(seed).permutation(layout.num_blocks)
    return [int(block) for block in dealt[: layout.num_blocks_for(NUM_TOKENS)]]


def fill(pool: Memory) -> Bytes:
    """Write random bytes into the whole pool and return them."""
    data = np.frombuffer(np.random.default_rng(7).bytes(pool.layout.total_bytes), dtype=np.uint8)
    device = device_memory(pool)
    if device is None:
        pool.buffer[:] = data.data
        return data
    import torch

    device.tensor.copy_(torch.from_numpy(data.copy()))
    written = getattr(pool, "written", None)
    if written is not None:
        written()
    return data


def read(pool: Memory) -> Bytes:
    """Return a copy of the whole pool."""
    device = device_memory(pool)
    if device is None:
        return np.frombuffer(bytes(pool.buffer), dtype=np.uint8)
    bytes_on_host: Bytes = device.tensor.to("cpu", copy=True).numpy()
    return bytes_on_host


def digests(data: Bytes, layout: PoolLayout, blocks: Sequence[int]) -> list[int]:
    """Return a digest of each tensor's bytes of all tokens, in token order."""
    return [xxhash.xxh3_64_intdigest(_rows(data, layout, tensor, blocks).tobytes()) for tensor in range(len(_TENSORS))]


def _rows(data: Bytes, layout: PoolLayout, tensor: int, blocks: Sequence[int]) -> Bytes:
    """Return one tensor's bytes: [NUM_TOKENS * token_bytes]."""
    size = layout.block_size * layout.tensors[tensor].token_bytes
    start = layout.offsets[tensor]
    whole = data[start : start + layout.num_blocks * size].reshape(layout.num_blocks, size)
    return whole[list(blocks)].reshape(-1)[: NUM_TOKENS * layout.tensors[tensor].token_bytes]
