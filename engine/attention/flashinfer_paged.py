"""Attention by FlashInfer's paged wrappers: blocks are read in place, and the work is planned on the host.

plan       | indptr [n + 1], indices, last_page_len [n], int32 on the CPU; a sequence's last query is at its last key
run        | q [num_tokens, num_heads, dim]; (keys, values), each [num_blocks, block_size, num_kv_heads, dim] (NHD)

Steps in which every sequence has one token use the decode wrapper, all others the prefill wrapper. A wrapper is planned
for one kind of layer; the plan is staged in pinned memory, which the device must have read before the next plan.
Names and rules are those of flashinfer-python 0.7.2; nothing here has run on a GPU yet.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from devices.interface import Device, Event
from engine.attention.block_tables import DecodeInputs, HostTables, TableUse, counts, read_tables
from engine.attention.interface import AttentionOptions
from engine.attention.reference import SlotWriter, write_rows
from engine.attention.sinks import apply_sinks
from engine.step_metadata import StepMetadata
from engine.transfers import upload

WORKSPACE_BYTES = 128 << 20
FIXED_WORKSPACE_BYTES = 8 << 20
"""Plan buffer of each wrapper: allocated on the device, and again in the host's pinned memory."""
_INT32 = 4
_FEW = 2
"""Up to this many query heads per KV head, FlashInfer's kernel without tensor cores is faster."""


@dataclass(frozen=True, slots=True)
class PlanKey:
    """What a plan depends on besides the step."""

    num_heads: int
    num_kv_heads: int
    dim: int
    dtype: torch.dtype
    block_size: int
    options: AttentionOptions  # without sinks, which are applied to the output

    @property
    def uses_tensor_cores(self) -> bool:
        """Whether to decode with the kernel that computes a KV head's group as one matrix."""
        return self.num_heads // self.num_kv_heads > _FEW

    def keywords(self) -> dict[str, Any]:
        """Return the keywords of both plan functions. FlashInfer's window counts the keys before the query's own."""
        window = self.options.sliding_window
        return {
            "sm_scale": self.options.scaling,
            "window_left": -1 if window is None else window - 1,
            "logits_soft_cap": self.options.softcap or 0.0,
            "q_data_type": self.dtype,
            "kv_data_type": self.dtype,
        }


@dataclass(frozen=True, slots=True)
class Pages:
    """A step in the form that FlashInfer's plan functions take: int32 on the CPU, `indices` on the device."""

    query_ends: torch.Tensor  # [num_sequences + 1], from 0
    indptr: torch.Tensor  # [num_sequences + 1], from 0
    indices: torch.Tensor  # [indptr[-1]]
    last_lengths: torch.Tensor  # [num_sequences]: tokens in the last block, 1 to block_size
    is_decode: bool


@dataclass(slots=True)
class _Planned:
    """A wrapper, and the event after which its staged plan has been read."""

    wrapper: Any
    staged: Event
    plan: Callable[[Pages], None] = field(repr=False)

    def replan(self, pages: Pages) -> None:
        """Plan for these pages."""
        self.staged.synchronize()
        self.plan(pages)
        self.staged.record()


class FlashInferAttention:
    """Implements GraphLibrary. Owns the workspace that all wrappers share: they run one after the other."""

    tables, has_softcap = TableUse.NONE, True
    dims = (64, 128, 256)
    """With other head dims its kernels fail or return wrong results (FlashInfer's issue 4299)."""

    def __init__(self, flashinfer: Any, device: Device, name: str = "flashinfer") -> None:
        """`flashinfer` is the module. Raises AttributeError if it lacks the wrappers."""
        self.device, self.name = device, name
        self._decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper
        self._prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        self._workspace: torch.Tensor | None = None
        self._wrappers: dict[tuple[PlanKey, bool], _Planned] = {}

    def plan(self, metadata: StepMetadata) -> "FlashInferStep":
        """See AttentionBackend; the first layer of each kind plans."""
        return FlashInferStep(self, metadata)

    def plan_decode(self, inputs: DecodeInputs) -> "FlashInferDecode":
        """See GraphBackend."""
        return FlashInferDecode(self, inputs)

    def fixed_bytes(self, rows: int, width: int) -> int:
        """See GraphBackend: one wrapper for each kind of layer, each with its own workspace and int32 buffers."""
        ends_and_lengths = 2 * (rows + 1) + rows  # for pages and, with tensor cores, for queries
        own = FIXED_WORKSPACE_BYTES + _INT32 * (rows * width + ends_and_lengths)
        return own * len({kind for kind, _ in self._wrappers})

    def wrapper_for(self, kind: PlanKey, *, is_decode: bool) -> _Planned:
        """Return the wrapper for this kind of layer, in decode or other steps; it is planned again for each step."""
        planned = self._wrappers.get((kind, is_decode))
        if planned is None:
            if is_decode:
                wrapper = self._decode(self.workspace(), "NHD", use_tensor_cores=kind.uses_tensor_cores)
                planned = self.planned_decode(wrapper, kind)
            else:
                wrapper = self._prefill(self.workspace(), "NHD")
                planned = _Planned(wrapper, self.device.event(), lambda pages: _plan_prefill(wrapper, kind, pages))
            self._wrappers[kind, is_decode] = planned
        return planned

    def fixed_wrapper(self, kind: PlanKey, inputs: DecodeInputs) -> _Planned:
        """Return a decode wrapper for these inputs alone: its plans are copied to fixed addresses."""
        rows, device = inputs.tables.shape[0], inputs.tables.device
        wrapper = self._decode(
            self.workspace(), "NHD", use_cuda_graph=True, use_tensor_cores=kind.uses_tensor_cores,
            paged_kv_indptr_buffer=torch.zeros(rows + 1, dtype=torch.int32, device=device),
            paged_kv_indices_buffer=torch.zeros(inputs.tables.numel(), dtype=torch.int32, device=device),
            paged_kv_last_page_len_buffer=torch.zeros(rows, dtype=torch.int32, device=device),
        )  # fmt: skip
        return self.planned_decode(wrapper, kind)

    def planned_decode(self, wrapper: Any, kind: PlanKey) -> _Planned:
        """Return a decode wrapper together with its plan function."""
        return _Planned(wrapper, self.device.event(), lambda pages: _plan_decode(wrapper, kind, pages))

    def workspace(self) -> torch.Tensor:
        """Return the buffer in which split computations are combined; the kernels require zeros at first."""
        if self._workspace is None:
            self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device.torch_device)
        return self._workspace


class FlashInferStep(SlotWriter):
    """One step."""

    def __init__(self, backend: FlashInferAttention, metadata: StepMetadata) -> None:
        super().__init__(metadata)
        self._backend = backend
        self._pages: Pages | None = None
        self._ready: dict[PlanKey, _Planned] = {}

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See StepAttention.attend."""
        kind = _kind_of(query, keys, options, self.metadata.block_size)
        planned = self._ready.get(kind)
        if planned is None:
            pages = self._pages = self._pages or _step_pages(self.metadata, keys.device)
            planned = self._ready[kind] = self._backend.wrapper_for(kind, is_decode=pages.is_decode)
            planned.replan(pages)
        return _run(planned.wrapper, query, keys, values, kind, options.sinks)


class FlashInferDecode:
    """Implements DecodeAttention. Wrappers are made in the first run, which is not captured.

    A plan copies its pages to the wrapper's buffers, so the host's work is proportional to the blocks in use.
    """

    reads_tables = False

    def __init__(self, backend: FlashInferAttention, inputs: DecodeInputs) -> None:
        self._backend, self.inputs = backend, inputs
        self._host: HostTables | None = None
        self._planned: dict[PlanKey, _Planned] = {}

    def prepare(self, host: HostTables) -> None:
        """Plan again for every kind of layer: a replay reads the plans at the same addresses."""
        self._host = host
        if self._planned:
            pages = self._pages(host)
            for planned in self._planned.values():
                planned.replan(pages)

    def step(self) -> "FlashInferFixedStep":
        """See DecodeAttention."""
        return FlashInferFixedStep(self)

    def wrapper_for(self, kind: PlanKey) -> Any:
        """Return the wrapper for this kind of layer, planned."""
        if kind not in self._planned:
            assert self._host is not None, "prepare comes before a run"
            planned = self._planned[kind] = self._backend.fixed_wrapper(kind, self.inputs)
            planned.replan(self._pages(self._host))
        return self._planned[kind].wrapper

    def _pages(self, host: HostTables) -> Pages:
        return _pages(host, self.inputs.block_size, self.inputs.tables.device, None)


class FlashInferFixedStep:
    """One run over fixed inputs."""

    def __init__(self, decode: FlashInferDecode) -> None:
        self._decode = decode

    def write(self, keys: torch.Tensor, values: torch.Tensor, new_keys: torch.Tensor, new_values: torch.Tensor) -> None:
        """See StepAttention.write."""
        write_rows(keys, new_keys, self._decode.inputs.slots)
        write_rows(values, new_values, self._decode.inputs.slots)

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See StepAttention.attend."""
        kind = _kind_of(query, keys, options, self._decode.inputs.block_size)
        return _run(self._decode.wrapper_for(kind), query, keys, values, kind, options.sinks)


def _kind_of(query: torch.Tensor, keys: torch.Tensor, options: AttentionOptions, block_size: int) -> PlanKey:
    plain = options if options.sinks is None else replace(options, sinks=None)
    return PlanKey(query.shape[0], keys.shape[1], keys.shape[2], query.dtype, block_size, plain)


def _step_pages(metadata: StepMetadata, device: torch.device) -> Pages:
    """Return the pages of a step with any mix of sequences."""
    packed = metadata.packed
    query_ends = None if bool((counts(packed) == 1).all()) else np.frombuffer(packed.query_ends, np.int32)
    return _pages(read_tables(packed, metadata.block_size), metadata.block_size, device, query_ends)


def _pages(host: HostTables, block_size: int, device: torch.device, query_ends: Any) -> Pages:
    """Return the pages; `query_ends` [num_sequences] are None where every sequence has one query."""
    ends = np.arange(1, len(host.used) + 1) if query_ends is None else query_ends
    return Pages(
        query_ends=_from_zero(ends),
        indptr=_from_zero(np.cumsum(host.used)),
        indices=upload(torch.from_numpy(host.blocks.astype(np.int32)), device),
        last_lengths=torch.from_numpy((host.kv_lengths - (host.used - 1) * block_size).astype(np.int32)),
        is_decode=query_ends is None,
    )


def _from_zero(ends: Any) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(([0], ends)).astype(np.int32))


def _plan_decode(wrapper: Any, kind: PlanKey, pages: Pages) -> None:
    wrapper.plan(
        pages.indptr, pages.indices, pages.last_lengths, kind.num_heads, kind.num_kv_heads, kind.dim,
        kind.block_size, **kind.keywords(),
    )  # fmt: skip


def _plan_prefill(wrapper: Any, kind: PlanKey, pages: Pages) -> None:
    wrapper.plan(
        pages.query_ends, pages.indptr, pages.indices, pages.last_lengths, kind.num_heads, kind.num_kv_heads,
        kind.dim, kind.block_size, causal=True, **kind.keywords(),
    )  # fmt: skip


def _run(
    wrapper: Any, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kind: PlanKey,
    sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    pages = (-1, kind.block_size, kind.num_kv_heads, kind.dim)
    rows, pools = query.transpose(0, 1).contiguous(), (keys.view(pages), values.view(pages))
    if sinks is None:
        out: torch.Tensor = wrapper.run(rows, pools)
        return out
    out, lse = wrapper.run(rows, pools, return_lse=True)  # [num_tokens, num_heads, dim] and [num_tokens, num_heads]
    return apply_sinks(out, lse * math.log(2), sinks)  # FlashInfer's logarithm has base 2
