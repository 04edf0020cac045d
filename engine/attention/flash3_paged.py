"""Attention by FlashAttention 3, for GPUs of compute capability 9.0: it reads blocks of any size in place.

query  [num_tokens, num_heads, dim]
pools  [num_blocks, block_size, kv_heads, dim]

Tables, lengths and ends are int32 on the device, so that a graph can be replayed with new values. One call computes a
whole step; a sequence's last query is at its last key. The kernel pads head dims to 64, 96, 128, 192 or 256 in its
products; the pool keeps the model's head dim. The kernel is flash_attn_with_kvcache of the package flash-attn-3
(hopper/flash_attn_interface.py); the rules are those of hopper/flash_api.cpp. Nothing here has run on a GPU yet.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.attention.block_tables import DecodeInputs, HostTables, TableUse, counts, read_tables
from engine.attention.interface import AttentionOptions
from engine.attention.reference import write_rows
from engine.attention.sinks import apply_sinks
from engine.step_metadata import StepMetadata
from engine.transfers import upload

PACKAGE, MODULE = "flash-attn-3", "flash_attn_interface"
CAPABILITY = 9
"""The major compute capability that all builds of the package support."""
Kernel = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class _Rows:
    """A step's rows in the form that the kernel takes: int32 on the device."""

    table: torch.Tensor  # [num_sequences, width]
    kv_lengths: torch.Tensor  # [num_sequences]
    query_ends: torch.Tensor  # [num_sequences + 1], from 0
    max_queries: int


class Flash3Attention:
    """Implements GraphLibrary."""

    tables, dims, has_softcap = TableUse.READ, range(8, 257, 8), True

    def __init__(self, kernel: Kernel, name: str = PACKAGE) -> None:
        """`kernel` is flash_attn_with_kvcache."""
        self.kernel, self.name = kernel, name

    def plan(self, metadata: StepMetadata) -> "Flash3Step":
        """See AttentionBackend."""
        return Flash3Step(self.kernel, metadata.slots, metadata.block_size, lambda: _step_rows(metadata))

    def plan_decode(self, inputs: DecodeInputs) -> "Flash3Decode":
        """See GraphBackend."""
        return Flash3Decode(self.kernel, inputs)

    def fixed_bytes(self, rows: int, width: int) -> int:
        """Return 0: tensors of a run are in the graph's memory."""
        return 0


class Flash3Decode:
    """Implements DecodeAttention; reads only the inputs, on the device."""

    reads_tables = True

    def __init__(self, kernel: Kernel, inputs: DecodeInputs) -> None:
        self._kernel, self._inputs = kernel, inputs

    def prepare(self, host: HostTables) -> None:
        """Nothing is planned on the host."""

    def step(self) -> "Flash3Step":
        """Start a run; what its layers share is computed within the run, so that a graph captures it."""
        inputs = self._inputs
        return Flash3Step(self._kernel, inputs.slots, inputs.block_size, lambda: _decode_rows(inputs))


class Flash3Step:
    """One step, or one run over fixed inputs; its layers share the rows."""

    def __init__(
        self, kernel: Kernel, slots: torch.Tensor, block_size: int, make_rows: Callable[[], _Rows]
    ) -> None:  # fmt: skip
        self._kernel, self._slots, self._block_size = kernel, slots, block_size
        self._make_rows = make_rows
        self._rows: _Rows | None = None

    def write(self, keys: torch.Tensor, values: torch.Tensor, new_keys: torch.Tensor, new_values: torch.Tensor) -> None:
        """See StepAttention.write."""
        write_rows(keys, new_keys, self._slots)
        write_rows(values, new_values, self._slots)

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See StepAttention.attend. The kernel's window counts the keys before the query's own."""
        rows = self._rows = self._rows or self._make_rows()
        pages = (-1, self._block_size, *keys.shape[1:])
        window = -1 if options.sliding_window is None else options.sliding_window - 1
        made = self._kernel(
            query.transpose(0, 1).contiguous(), keys.view(pages), values.view(pages), cache_seqlens=rows.kv_lengths,
            page_table=rows.table, cu_seqlens_q=rows.query_ends, max_seqlen_q=rows.max_queries,
            softmax_scale=options.scaling, causal=True, window_size=(window, 0), softcap=options.softcap or 0.0,
            return_softmax_lse=options.sinks is not None,
        )  # fmt: skip
        # made[1], the logarithms of the softmax's sums, is [num_heads, num_tokens]
        out: torch.Tensor = made if options.sinks is None else apply_sinks(made[0], made[1].t(), options.sinks)
        return out


def _step_rows(metadata: StepMetadata) -> _Rows:
    device, packed = metadata.slots.device, metadata.packed
    host, queries = read_tables(packed, metadata.block_size), counts(packed)

    def on_device(values: Any) -> torch.Tensor:
        return upload(torch.from_numpy(np.ascontiguousarray(values, np.int32)), device)

    ends = np.concatenate(([0], np.cumsum(queries)))
    return _Rows(on_device(host.tables), on_device(host.kv_lengths), on_device(ends), int(queries.max()))


def _decode_rows(inputs: DecodeInputs) -> _Rows:
    ends = torch.arange(len(inputs.slots) + 1, dtype=torch.int32, device=inputs.slots.device)
    return _Rows(inputs.tables.to(torch.int32), inputs.kv_lengths.to(torch.int32), ends, 1)
