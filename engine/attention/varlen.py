"""Attention by torch's flash kernel for sequences of any length: one call for a whole step, over gathered blocks.

    query [num_tokens, heads, dim], keys and values [num_keys, kv_heads, dim], with int32 cumulative lengths from 0

A sequence's last query is at its last key. The kernel is torch's own (torch.nn.attention.varlen), in builds of torch
for GPUs; nothing here has run on a GPU yet. torch_paged.py computes fixed decode steps.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.attention.block_tables import Ints, TableUse, counts, read_tables
from engine.attention.interface import AttentionOptions
from engine.attention.reference import SlotWriter
from engine.attention.sinks import apply_sinks
from engine.step_metadata import StepMetadata
from engine.transfers import upload

VarlenKernel = Callable[..., Any]
MAX_KEYS = 1 << 18
"""The most tokens gathered at once: 512 MiB of keys and 512 MiB of values, with 8 heads of 128 dims in 16 bits."""


class VarlenAttention:
    """Implements PagedLibrary, but not for graphs: the gather would be as wide as the tables, as in torch_paged.py."""

    name, tables = "torch's flash kernel", TableUse.GATHER
    dims, has_softcap = range(8, 257, 8), False

    def __init__(self, kernel: VarlenKernel) -> None:
        """`kernel` is torch.nn.attention.varlen.varlen_attn."""
        self.kernel = kernel

    def plan(self, metadata: StepMetadata) -> "VarlenStep":
        """See AttentionBackend."""
        return VarlenStep(self.kernel, metadata)


@dataclass(frozen=True, slots=True)
class _Group:
    """Consecutive sequences that one call computes."""

    rows: slice
    slots: torch.Tensor  # [keys of all]: each sequence's slots, in order
    query_ends: torch.Tensor  # [num_sequences + 1] int32, from 0, like the next
    key_ends: torch.Tensor
    max_queries: int
    max_keys: int


class VarlenStep(SlotWriter):
    """One step; its layers share the slots of the keys."""

    def __init__(self, kernel: VarlenKernel, metadata: StepMetadata) -> None:
        super().__init__(metadata)
        self._kernel = kernel
        self._groups: tuple[_Group, ...] | None = None

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See StepAttention.attend."""
        groups = self._groups = self._groups or tuple(_groups_of(self.metadata))
        outputs = [self._attend(group, query, keys, values, options) for group in groups]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend(
        self, group: _Group, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        from torch.nn.attention.varlen import AuxRequest

        window = -1 if options.sliding_window is None else options.sliding_window - 1
        made = self._kernel(
            query[:, group.rows].transpose(0, 1).contiguous(), keys.index_select(0, group.slots),
            values.index_select(0, group.slots), group.query_ends, group.key_ends, group.max_queries, group.max_keys,
            scale=options.scaling, window_size=(window, 0), enable_gqa=query.shape[0] != keys.shape[1],
            return_aux=None if options.sinks is None else AuxRequest(lse=True),
        )  # fmt: skip
        # made[1], the logarithms of the softmax's sums, is [num_heads, num_tokens]
        out: torch.Tensor = made if options.sinks is None else apply_sinks(made[0], made[1].t(), options.sinks)
        return out


def _groups_of(metadata: StepMetadata) -> Iterator[_Group]:
    packed, size, device = metadata.packed, metadata.block_size, metadata.slots.device
    host, queries = read_tables(packed, size), counts(packed)
    slots = (host.tables[:, :, None] * size + np.arange(size)).reshape(len(queries), -1)
    held = np.arange(slots.shape[1]) < host.kv_lengths[:, None]
    begin, row = 0, 0
    while begin < len(queries):
        end = max(begin + 1, int(np.searchsorted(np.cumsum(host.kv_lengths[begin:]), MAX_KEYS, "right")) + begin)
        part = slice(begin, end)
        ends = [upload(_from_zero(lengths[part]), device) for lengths in (queries, host.kv_lengths)]
        num_rows = int(queries[part].sum())
        yield _Group(
            slice(row, row + num_rows), upload(torch.from_numpy(slots[part][held[part]]), device), ends[0], ends[1],
            int(queries[part].max()), int(host.kv_lengths[part].max()),
        )  # fmt: skip
        begin, row = end, row + num_rows


def _from_zero(lengths: Ints) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
