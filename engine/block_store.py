"""Copies of a host pool's blocks in ordinary memory: what a model of one rank keeps in its part of the swap area."""

from collections.abc import Sequence

from engine.interface import Memory


class BlockStore:
    """Owner of the copies, one a slot; a slot costs memory from its first use on, and keeps it for the next."""

    def __init__(self, memory: Memory) -> None:
        layout = memory.layout
        self._memory = memory
        sizes = [layout.block_size * tensor.token_bytes for tensor in layout.tensors]
        self._spans = tuple(zip(layout.offsets, sizes, strict=True))
        self._copies: dict[int, bytearray] = {}

    def save(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Copy each block, all tensors of it, into its slot."""
        for block_id, slot in zip(block_ids, slots, strict=True):
            copy = self._copies.get(slot)
            if copy is None:
                copy = self._copies[slot] = bytearray(sum(size for _, size in self._spans))
            with memoryview(copy) as target:
                at = 0
                for offset, size in self._spans:
                    begin = offset + block_id * size
                    target[at : at + size] = self._memory.buffer[begin : begin + size]
                    at += size

    def load(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy each slot back, into its block."""
        for slot, block_id in zip(slots, block_ids, strict=True):
            with memoryview(self._copies[slot]) as source:
                at = 0
                for offset, size in self._spans:
                    begin = offset + block_id * size
                    self._memory.buffer[begin : begin + size] = source[at : at + size]
                    at += size
