"""Attention with torch only, on any device: few calls for all decoding rows, one call for each prompt chunk.

rows   | keys                                              | one call for
decode | gathered by block tables, padded, masked          | sequences of similar length, at most MAX_KEYS keys
chunk  | gathered as they are                              | one sequence's prompt tokens

A decode step over fixed tensors (DecodeInputs) reads nothing else, so that a graph can replay it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.block_tables import DecodeInputs, HostTables, Ints, counts, read_tables
from engine.attention.interface import AttentionOptions
from engine.attention.reference import SlotWriter, write_rows
from engine.step_metadata import StepMetadata
from engine.transfers import upload

MAX_KEYS = 1 << 16
"""The most tokens gathered at once: 128 MiB of keys and 128 MiB of values, with 8 heads of 128 dims in 16 bits."""
FEW_KEYS = 1 << 12
"""Gathering up to this many tokens (8 MiB of keys) takes so little time that no narrower graphs are captured."""
_MAX_SCORES = 1 << 26
"""The most scores in memory at once where the fused kernel cannot be used: 256 MiB in float32."""


class TorchPagedAttention:
    """The backend. It has no state."""

    def plan(self, metadata: StepMetadata) -> "TorchPagedStep":
        """Return the step; its first layer computes what all layers share."""
        return TorchPagedStep(metadata)

    def plan_decode(self, inputs: DecodeInputs) -> "FixedDecode":
        """See GraphBackend. Gathers the full width of the tables, so they should be no wider than needed."""
        return FixedDecode(inputs)

    def table_widths(self, rows: int, max_blocks: int, block_size: int) -> tuple[int, ...]:
        """See GraphBackend. The widest gathers MAX_KEYS: a step with wider tables runs without a graph, in groups."""
        return doubled_widths(rows, max_blocks, block_size, MAX_KEYS)

    def fixed_bytes(self, rows: int, width: int) -> int:
        """Return 0: tensors of a run are in the graph's memory."""
        return 0


def doubled_widths(rows: int, max_blocks: int, block_size: int, max_keys: int | None = None) -> tuple[int, ...]:
    """Return widths, each twice the one before it, so that at most half of a table's columns are unused.

    The widest is `max_blocks`, or as many blocks as `max_keys` allows for `rows` sequences.
    """
    keys = rows * block_size
    widest = max_blocks if max_keys is None else min(max_blocks, max_keys // keys)
    narrowest = max(1, FEW_KEYS // keys)
    doubled = [narrowest << power for power in range(widest.bit_length()) if narrowest << power < widest]
    return (*doubled, widest) if widest else ()


class TorchPagedStep(SlotWriter):
    """One step. The first layer that runs here computes what all of them share; a library may run every layer."""

    @cached_property
    def _decode_groups_of_step(self) -> tuple["_DecodeGroup", ...]:
        return tuple(_decode_groups(self.metadata))

    @cached_property
    def _chunks(self) -> tuple["_Chunk", ...]:
        return tuple(_chunks(self.metadata))

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See StepAttention.attend."""
        if len(self._decode_groups_of_step) == 1 and not self._chunks and self._decode_groups_of_step[0].is_in_order:
            return self._decode_groups_of_step[0].attend(query, keys, values, options)
        output = query.new_empty(query.shape[1], query.shape[0], values.shape[-1])  # [num_tokens, num_heads, dim]
        for group in self._decode_groups_of_step:
            output[group.rows] = group.attend(query[:, group.rows], keys, values, options)
        for chunk in self._chunks:
            output[chunk.rows] = chunk.attend(query[:, chunk.rows], keys, values, options)
        return output


class FixedDecode:
    """Implements DecodeAttention; reads only the inputs."""

    def __init__(self, inputs: DecodeInputs) -> None:
        self._inputs = inputs

    reads_tables = True

    def prepare(self, host: HostTables) -> None:
        """Nothing is planned on the host."""

    def step(self) -> "FixedStep":
        """Start a run; what its layers share is computed within the run, so that a graph captures it."""
        return FixedStep(self._inputs)


class FixedStep:
    """One run over fixed inputs."""

    def __init__(self, inputs: DecodeInputs) -> None:
        self._slots = inputs.slots
        self._table = _Table(inputs.tables, inputs.kv_lengths, inputs.slots, inputs.block_size)

    def write(self, keys: torch.Tensor, values: torch.Tensor, new_keys: torch.Tensor, new_values: torch.Tensor) -> None:
        """See StepAttention.write."""
        write_rows(keys, new_keys, self._slots)
        write_rows(values, new_values, self._slots)

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See StepAttention.attend."""
        return self._table.attend(query, keys, values, options)


class _Table:
    """Rows of one query each, and the slots of their keys from the block tables.

    Masked keys are read from the slot of the row's own token, which is always written: they must be neither another
    request's nor NaN.
    """

    def __init__(
        self, tables: torch.Tensor, kv_lengths: torch.Tensor, own_slots: torch.Tensor, block_size: int,
        max_keys: int | None = None, *, is_whole: bool = False,
    ) -> None:  # fmt: skip
        """`max_keys` is the length of the longest row; `is_whole`: all rows have that length."""
        self._tables, self._lengths, self._own, self._block_size = tables, kv_lengths, own_slots, block_size
        self._max_keys = tables.shape[1] * block_size if max_keys is None else max_keys
        self._is_whole = is_whole
        self._places: dict[int | None, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Return [num_rows, num_heads, value_dim]. query: [num_heads, num_rows, head_dim]."""
        slots, visible = self._places_in(options.sliding_window)
        num_rows, num_kv_heads = slots.shape[0], keys.shape[1]
        rows = query.transpose(0, 1).reshape(num_rows, num_kv_heads, -1, query.shape[-1])  # a KV head's group
        sinks = None if options.sinks is None else options.sinks.view(num_kv_heads, -1)
        mask = None if visible is None else visible[:, None, None]
        out = _weigh(rows, _gather(keys, slots), _gather(values, slots), mask, options, sinks)
        return out.flatten(1, 2)

    def _places_in(self, window: int | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the slots of the keys, [num_rows, num_keys], and which are visible; None where all are."""
        hides = window is not None and window < self._max_keys
        key = window if hides else None
        if key not in self._places:
            self._places[key] = self._find(key)
        return self._places[key]

    def _find(self, window: int | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        size, device, lengths = self._block_size, self._tables.device, self._lengths[:, None]
        tables, max_keys, first = self._tables, self._max_keys, torch.zeros_like(lengths)
        if window is not None:  # only the blocks that the window may touch
            first = (lengths - window).clamp(min=0) // size
            width = min(tables.shape[1], -(-window // size) + 1)
            max_keys = min(max_keys, width * size)
            tables = tables.gather(1, (first + torch.arange(width, device=device)).clamp(max=tables.shape[1] - 1))
        slots = (tables[:, :, None] * size + torch.arange(size, device=device)).flatten(1)[:, :max_keys]
        if self._is_whole and window is None:
            return slots, None
        positions = first * size + torch.arange(slots.shape[1], device=device)
        visible = positions < lengths
        if window is not None:
            visible &= positions >= lengths - window
        return torch.where(visible, slots, self._own[:, None]), visible


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Some of the step's decoding rows; `is_in_order`: these are all rows of the step, in its order."""

    rows: torch.Tensor
    table: _Table
    is_in_order: bool

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        return self.table.attend(query, keys, values, options)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Several tokens of one prompt, tokens [start, end), and the slots of all tokens before `end`."""

    rows: slice
    start: int
    end: int
    slots: torch.Tensor  # [end]

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Return [count, num_heads, value_dim]; a KV head is a batch entry whose group shares its keys."""
        window = options.sliding_window
        first = 0 if window is None else max(0, self.start - window + 1)
        slots, group = self.slots[None, first:], query.shape[0] // keys.shape[1]
        own_keys, own_values = (
            _gather(pool, slots)[0][:, None].expand(-1, group, -1, -1) for pool in (keys, values)
        )  # fmt: skip
        rows = query.reshape(keys.shape[1], group, query.shape[1], -1)  # [num_kv_heads, group, count, head_dim]
        sinks = None if options.sinks is None else options.sinks.view(-1, group, 1)
        if self.start == 0 and (window is None or window >= self.end) and not _is_unfused(options):
            out = _weigh(rows, own_keys, own_values, None, options, None, is_causal=True)
        else:
            parts = [
                _weigh(
                    rows[:, :, part], own_keys, own_values, self._visible(part, first, window), options, sinks
                )
                for part in self._parts(query.shape[0], options)
            ]  # fmt: skip
            out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        return out.flatten(0, 1).transpose(0, 1)

    def _parts(self, num_heads: int, options: AttentionOptions) -> Iterator[slice]:
        """Yield the queries of each call: all at once, unless the scores have to be in memory."""
        count = self.end - self.start
        size = max(1, _MAX_SCORES // (num_heads * self.end)) if _is_unfused(options) else count
        for begin in range(0, count, size):
            yield slice(begin, min(begin + size, count))

    def _visible(self, part: slice, first: int, window: int | None) -> torch.Tensor:
        """Return [queries, keys from `first` on] bool."""
        device = self.slots.device
        queries = torch.arange(self.start + part.start, self.start + part.stop, device=device)[:, None]
        positions = torch.arange(first, self.end, device=device)
        visible = positions <= queries
        return visible if window is None else visible & (positions > queries - window)


def _decode_groups(metadata: StepMetadata) -> Iterator[_DecodeGroup]:
    """Yield groups of the sequences with one row, longest first, so that the lengths in a group are similar."""
    packed, size = metadata.packed, metadata.block_size
    alone = np.flatnonzero(counts(packed) == 1)
    if not len(alone):
        return
    host, device = read_tables(packed, size, alone), metadata.slots.device
    rows = np.frombuffer(packed.query_ends, np.int32).astype(np.int64)[alone] - 1
    used = host.used
    fits = len(alone) * int(used.max()) * size <= MAX_KEYS
    order = np.arange(len(alone)) if fits else np.argsort(-used, kind="stable")
    begin = 0
    while begin < len(order):
        width = int(used[order[begin:]].max())
        chosen = order[begin : begin + max(1, MAX_KEYS // (width * size))]
        begin += len(chosen)
        lengths = host.kv_lengths[chosen]
        whole = bool((lengths == lengths[0]).all())
        made = _to_device(device, np.column_stack([rows[chosen], lengths, host.tables[chosen, :width]]))
        at = made[:, 0].contiguous()
        table = _Table(
            made[:, 2:], made[:, 1], metadata.slots[at], size, max_keys=int(lengths.max()), is_whole=whole
        )  # fmt: skip
        yield _DecodeGroup(at, table, is_in_order=fits and len(alone) == len(packed.query_ends))


def _chunks(metadata: StepMetadata) -> Iterator[_Chunk]:
    """Yield the sequences with several rows; the slots of all are uploaded at once."""
    size, parts = metadata.block_size, [part for part in metadata.rows() if part[1].count > 1]
    if not parts:
        return
    host = read_tables(metadata.packed, size, np.flatnonzero(counts(metadata.packed) > 1))
    slots = (host.tables[:, :, None] * size + np.arange(size)).reshape(len(parts), -1)
    held = np.arange(slots.shape[1]) < host.kv_lengths[:, None]
    ends = np.cumsum(host.kv_lengths).tolist()
    joined = _to_device(metadata.slots.device, slots[held])
    for (rows, sequence), end in zip(parts, ends, strict=True):
        yield _Chunk(rows, sequence.start, sequence.kv_length, joined[end - sequence.kv_length : end])


def _to_device(device: torch.device, values: Ints) -> torch.Tensor:
    return upload(torch.from_numpy(np.ascontiguousarray(values)), device)


def _gather(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return the pool's rows at `slots` [rows, keys] as [rows, heads, keys, dim]."""
    return pool.index_select(0, slots.flatten()).view(*slots.shape, *pool.shape[1:]).transpose(1, 2)


def _is_unfused(options: AttentionOptions) -> bool:
    """Return whether the layer's options need plain operations in place of the fused kernel."""
    return options.softcap is not None or options.sinks is not None


def _weigh(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor | None,
    options: AttentionOptions, sinks: torch.Tensor | None, *, is_causal: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Return [batch, heads, queries, value_dim] in the query's dtype.

    `visible` broadcasts to [batch, heads, queries, keys]; `sinks` to the scores without the keys dimension.
    """
    dtype = query.dtype
    if dtype != keys.dtype or _is_unfused(options):
        query, keys, values = query.float(), keys.float(), values.float()
    if not _is_unfused(options):
        out = scaled_dot_product_attention(query, keys, values, visible, is_causal=is_causal, scale=options.scaling)
        return out.to(dtype)
    scores = query @ keys.transpose(-1, -2) * options.scaling
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is None:
        return (scores.softmax(dim=-1) @ values).to(dtype)
    column = sinks.float()[..., None].expand(*scores.shape[:-1], 1)
    return (torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1] @ values).to(dtype)
