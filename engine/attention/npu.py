"""Attention on NPUs: torch_npu's fused kernel reads blocks in place; torch computes unsupported layers.

layer                            | calls of npu_fused_infer_attention_score (engine/attention/npu_fused.py)
bfloat16, head dim 64 or 128     | one: all rows, TND, with a band where the layer has a window
others                           | each chunk alone, BSH; single rows together, BSH, a window as a mask of their own
sinks                            | the same, TND by v2 of the op; with BSH, sinks are applied to its output
"""

from collections.abc import Iterator
from functools import cached_property

import torch

from engine.attention.block_tables import DecodeInputs, HostTables
from engine.attention.interface import AttentionOptions, StepAttention
from engine.attention.npu_fused import LayerRows, attend_alone, attend_together, takes_tnd, triangle, why_not
from engine.attention.npu_rows import FixedRows, PlannedRows, StepRows
from engine.attention.torch_paged import TorchPagedAttention
from engine.step_metadata import StepMetadata
from telemetry.logs import EventLogger

_log = EventLogger("engine")
_OP = "npu_fused_infer_attention_score"
_LENGTHS = ("actual_seq_lengths_kv", "actual_seq_kvlen")
"""The names, in the op and in its v2, of the host lists that change from step to step."""


class NpuAttention:
    """The NPU backend. One thread calls it."""

    def __init__(self, *, uses_tnd: bool = True, uses_masks: bool = True) -> None:
        """Without `uses_tnd` every call is BSH, which is slower for prompts and has fewer documented restrictions.

        Without `uses_masks` torch computes layers with a window: BSH needs masks for their single rows.
        """
        self.uses_tnd, self.uses_masks = uses_tnd, uses_masks
        layouts = "" if uses_tnd else ", layout BSH only"
        self.note = f"attention by {_OP}{layouts}" + ("" if uses_masks else ", windows by torch")
        bsh = (NpuAttention(uses_tnd=False), NpuAttention(uses_tnd=False, uses_masks=False)) if uses_tnd else ()
        self.alternatives = bsh
        """Backends to try where this one fails its check at load (backend_choice.py)."""
        self.torch = TorchPagedAttention()
        self._refused: set[str] = set()
        self._triangles: dict[torch.device, torch.Tensor] = {}

    def plan(self, metadata: StepMetadata) -> "NpuStep":
        """See AttentionBackend."""
        return NpuStep(self, PlannedRows(metadata), metadata.slots, self.torch.plan(metadata))

    def plan_decode(self, inputs: DecodeInputs) -> "NpuDecode":
        """See GraphBackend."""
        return NpuDecode(self, inputs)

    def table_widths(self, rows: int, max_blocks: int, block_size: int) -> tuple[int, ...]:
        """See GraphBackend: the op reads what each row needs, but torch gathers keys of the whole width."""
        return self.torch.table_widths(rows, max_blocks, block_size) if self._refused else (max_blocks,)

    def fixed_bytes(self, rows: int, width: int) -> int:
        """Return 0: tensors of a run are in the graph's memory, and decode steps need no chunk mask."""
        return 0

    def supports(self, layer: LayerRows) -> bool:
        """Return whether the op supports this layer; each reason against it is logged once."""
        why = why_not(layer)
        if why is None and layer.options.sliding_window is not None and not self.uses_masks:
            why = "the op applies masks for windows wrongly on this device"
        if why is not None and why not in self._refused:
            self._refused.add(why)
            _log.warning("attention_fallback", failed=_OP, used="torch", reason=why)
        return why is None

    def triangle(self, device: torch.device) -> torch.Tensor:
        """Return the causal mask of chunks, cached for later steps."""
        if device not in self._triangles:
            self._triangles[device] = triangle(device)
        return self._triangles[device]


class NpuStep:
    """One step, or one run over fixed inputs: each layer runs on the op where it supports the layer, else on torch."""

    def __init__(
        self, backend: NpuAttention, rows: PlannedRows | FixedRows, slots: torch.Tensor, by_torch: StepAttention
    ) -> None:
        self._backend, self._rows, self._slots, self._torch = backend, rows, slots, by_torch
        self._masks: dict[int, torch.Tensor] = {}

    def write(self, keys: torch.Tensor, values: torch.Tensor, new_keys: torch.Tensor, new_values: torch.Tensor) -> None:
        """See StepAttention.write. "Norm" is the pool's layout, not the op's default."""
        torch.ops.npu.npu_scatter_pa_kv_cache(
            _by_token(new_keys, keys.dtype), _by_token(new_values, values.dtype), self._blocks(keys),
            self._blocks(values), self._slots, cache_mode="Norm",
        )  # fmt: skip

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See StepAttention.attend."""
        layer = LayerRows(_by_token(query, query.dtype), keys, values, options, self._rows.block_size)
        if not self._backend.supports(layer):
            return self._torch.attend(query, keys, values, options)
        parts = list(self._parts(layer))
        if len(parts) == 1:
            return parts[0][1]
        output = torch.empty_like(layer.query)  # [num_tokens, num_heads, dim]
        for rows, made in parts:
            assert rows.places is not None, "a part of a step has the rows' places"
            output.index_copy_(0, rows.places, made)
        return output

    def _parts(self, layer: LayerRows) -> Iterator[tuple[StepRows, torch.Tensor]]:
        """Yield the rows of each call and their outputs."""
        rows, window = self._rows, layer.options.sliding_window
        if window is not None and window >= rows.longest:
            window = None  # every key is inside the window
        if self._backend.uses_tnd and takes_tnd(layer, rows.num_sequences):
            yield rows.everything, attend_together(layer, rows.everything, self._triangle, window)
            return
        for chunk in rows.each_chunk:
            yield chunk, attend_alone(layer, chunk, self._triangle, window)
        if rows.singles is not None:
            mask = None if window is None else self._window_mask(rows.singles, window)
            yield rows.singles, attend_alone(layer, rows.singles, mask, window)

    @cached_property
    def _triangle(self) -> torch.Tensor:
        return self._backend.triangle(self._slots.device)

    def _window_mask(self, rows: StepRows, window: int) -> torch.Tensor:
        if window not in self._masks:
            self._masks[window] = rows.hidden(window, self._rows.block_size)
        return self._masks[window]

    def _blocks(self, pool: torch.Tensor) -> torch.Tensor:
        return pool.view(-1, self._rows.block_size, *pool.shape[1:])


class NpuDecode:
    """Implements DecodeAttention. Owns the KV lengths on the host that the next run reads."""

    reads_tables = True

    def __init__(self, backend: NpuAttention, inputs: DecodeInputs) -> None:
        self._backend, self._inputs = backend, inputs
        self._torch = backend.torch.plan_decode(inputs)
        self._kv_lengths: list[int] = []

    def prepare(self, host: HostTables) -> dict[str, list[int]]:
        """See DecodeAttention."""
        self._torch.prepare(host)
        self._kv_lengths = host.kv_lengths.tolist()
        return dict.fromkeys(_LENGTHS, self._kv_lengths)

    def step(self) -> NpuStep:
        """See DecodeAttention."""
        rows = FixedRows(self._inputs, self._kv_lengths)
        return NpuStep(self._backend, rows, self._inputs.slots, self._torch.step())


def _by_token(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return [heads, num_tokens, dim] as contiguous [num_tokens, heads, dim]."""
    return rows.transpose(0, 1).to(dtype).contiguous()
