"""Copies of a device pool's blocks in host memory: a device model's part of the swap area."""

from collections.abc import Sequence

import torch

from devices.interface import Memory

_EXTENT_BYTES = 16 << 20  # host memory allocated at once


class DeviceBlockStore:
    """Owner of the copies, one per slot, in extents of host memory that are kept for reuse.

    A slot has the bytes of all tensors of its block, one after another. Copies are complete when a call returns.
    """

    def __init__(self, memory: Memory) -> None:
        """`memory` is a pool in device memory: it has a `tensor`."""
        layout = memory.layout
        self._sizes = [layout.block_size * tensor.token_bytes for tensor in layout.tensors]
        pool: torch.Tensor = memory.tensor  # type: ignore[attr-defined]
        self._views = [
            pool[offset : offset + layout.num_blocks * size].view(layout.num_blocks, size)
            for offset, size in zip(layout.offsets, self._sizes, strict=True)
        ]  # one for each tensor, [num_blocks, block_bytes]
        self._slot_bytes = sum(self._sizes)
        self._extent_slots = max(1, _EXTENT_BYTES // self._slot_bytes)
        self._extents: dict[int, torch.Tensor] = {}  # [extent_slots, slot_bytes] each
        self._is_pinned = torch.accelerator.is_available()

    def save(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Copy all tensors of each block into its slot."""
        if not block_ids:
            return
        at = self._index(block_ids)
        gathered = torch.cat([view[at] for view in self._views], dim=1).cpu()  # [num_blocks, slot_bytes]
        for row, slot in zip(gathered, slots, strict=True):
            self._slot_tensor(slot).copy_(row)

    def load(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy each slot back into its block."""
        if not block_ids:
            return
        at = self._index(block_ids)
        rows = torch.stack([self._slot_tensor(slot) for slot in slots]).to(at.device)  # [num_blocks, slot_bytes]
        for view, part in zip(self._views, torch.split(rows, self._sizes, dim=1), strict=True):
            view.index_copy_(0, at, part)

    def close(self) -> None:
        """Free the copies and drop the references to the pool. Idempotent; no other call may follow."""
        self._views.clear()
        self._extents.clear()

    def _index(self, block_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(block_ids, dtype=torch.int64, device=self._views[0].device)

    def _slot_tensor(self, slot: int) -> torch.Tensor:
        number, place = divmod(slot, self._extent_slots)
        extent = self._extents.get(number)
        if extent is None:
            shape = (self._extent_slots, self._slot_bytes)
            extent = self._extents[number] = torch.empty(shape, dtype=torch.uint8, pin_memory=self._is_pinned)
        return extent[place]
