"""Attention on CPU by torch's fused kernel: views of the pool where blocks are contiguous, else one gather per group.

piece          | keys                       | one kernel call for
chunk          | view or gather             | one sequence's prompt tokens
single decode  | view                       | one sequence whose keys are contiguous in the pool
decode group   | gather, padded, masked     | sequences of similar length whose blocks are scattered
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.interface import AttentionOptions
from engine.attention.reference import ReferenceAttention, SlotWriter, slots_of, visible
from engine.step import BatchSequence
from engine.step_metadata import StepMetadata


@dataclass(frozen=True, slots=True)
class _Piece:
    """One kernel call: the query rows that it computes and the slots of its keys.

    `rows` is a slice for one sequence and an index tensor for a group. `slots` is a slice where no copy is needed.
    """

    rows: slice | torch.Tensor
    batch: int
    slots: slice | torch.Tensor
    mask: torch.Tensor | None = None
    is_causal: bool = False
    is_chunk: bool = False


class TorchCpuAttention:
    """The backend that uses only torch. Owns scratch memory for gathered keys and values, reused by all steps."""

    def __init__(self) -> None:
        self._scratch = (_Scratch(), _Scratch())
        self._reference = ReferenceAttention()

    def plan(self, metadata: StepMetadata) -> "TorchCpuStep":
        """Plans are made on first use, one for each sliding window."""
        return TorchCpuStep(metadata, self._scratch, self._reference)


class TorchCpuStep(SlotWriter):
    """One step; its layers share the pieces."""

    def __init__(
        self, metadata: StepMetadata, scratch: tuple["_Scratch", "_Scratch"], reference: ReferenceAttention
    ) -> None:
        super().__init__(metadata)
        self._scratch = scratch
        self._reference = reference
        self._pieces: dict[int | None, tuple[_Piece, ...]] = {}

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See StepAttention.attend. The reference computes what the fused kernel lacks (caps, sinks, mixed dtypes)."""
        if options.softcap is not None or options.sinks is not None or query.dtype != keys.dtype:
            return self._reference.plan(self.metadata).attend(query, keys, values, options)
        pieces = self._pieces_for(options.sliding_window)
        if len(pieces) == 1 and isinstance(pieces[0].rows, slice):
            return self._run(pieces[0], query, keys, values, options.scaling)
        output = query.new_empty(query.shape[1], query.shape[0], values.shape[-1])  # [num_tokens, num_heads, dim]
        for piece in pieces:
            output[piece.rows] = self._run(piece, query, keys, values, options.scaling)
        return output

    def _pieces_for(self, window: int | None) -> tuple[_Piece, ...]:
        if window not in self._pieces:
            self._pieces[window] = tuple(_plan_pieces(self.metadata, window))
        return self._pieces[window]

    def _run(
        self, piece: _Piece, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Return the piece's rows: [num_rows, num_heads, dim]."""
        num_heads, num_kv_heads = query.shape[0], keys.shape[1]
        group = num_heads // num_kv_heads
        rows = query[:, piece.rows]  # [num_heads, num_rows, head_dim]
        piece_keys = _take(keys, piece, self._scratch[0])  # [batch, num_kv_heads, length, head_dim]
        piece_values = _take(values, piece, self._scratch[1])
        if piece.is_chunk:  # a KV head is a batch entry; its group shares its keys without a copy
            rows = rows.reshape(num_kv_heads, group, rows.shape[1], -1)
            piece_keys = piece_keys[0][:, None].expand(-1, group, -1, -1)
            piece_values = piece_values[0][:, None].expand(-1, group, -1, -1)
        else:  # decode: the heads of a group are the queries of their one KV head
            rows = rows.transpose(0, 1).reshape(piece.batch, num_kv_heads, group, -1)
        out = scaled_dot_product_attention(
            rows, piece_keys, piece_values, attn_mask=piece.mask, is_causal=piece.is_causal, scale=scaling
        )
        return out.flatten(0, 1).transpose(0, 1) if piece.is_chunk else out.flatten(1, 2)


class _Scratch:
    """A reusable buffer that grows as needed."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def gather(self, pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Return pool[slots] in this buffer; valid until the next gather."""
        shape = (slots.shape[0], *pool.shape[1:])
        needed = slots.shape[0] * pool.shape[1] * pool.shape[2]
        if self._buffer is None or self._buffer.numel() < needed or self._buffer.dtype != pool.dtype:
            self._buffer = torch.empty(needed + needed // 4, dtype=pool.dtype, device=pool.device)
        gathered = self._buffer[:needed].view(shape)
        torch.index_select(pool, 0, slots, out=gathered)
        return gathered


def _take(pool: torch.Tensor, piece: _Piece, scratch: _Scratch) -> torch.Tensor:
    """Return [batch, heads, length, dim] of the piece's slots."""
    taken = pool[piece.slots] if isinstance(piece.slots, slice) else scratch.gather(pool, piece.slots)
    return taken.view(piece.batch, -1, *pool.shape[1:]).transpose(1, 2)


def _plan_pieces(metadata: StepMetadata, window: int | None) -> Iterator[_Piece]:
    device = metadata.slots.device
    scattered: dict[int, list[tuple[int, torch.Tensor]]] = defaultdict(list)
    for rows, sequence in metadata.rows():
        first_key = 0 if window is None else max(0, sequence.start - window + 1)
        slots = _key_slots(sequence, first_key, metadata.block_size, device)
        if sequence.count > 1:
            yield _chunk_piece(rows, sequence, first_key, slots, window, device)
        elif isinstance(slots, torch.Tensor):
            scattered[slots.shape[0].bit_length()].append((rows.start, slots))
        else:
            yield _Piece(rows, 1, slots)
    for group in scattered.values():
        yield _group_piece(group)


def _key_slots(sequence: BatchSequence, first_key: int, block_size: int, device: torch.device) -> slice | torch.Tensor:
    """Return the slots of keys [first_key, kv_length): a slice where their blocks are contiguous in the pool."""
    used = sequence.block_ids[first_key // block_size : -(-sequence.kv_length // block_size)]
    if all(b == a + 1 for a, b in pairwise(used)):
        start = used[0] * block_size + first_key % block_size
        return slice(start, start + sequence.kv_length - first_key)
    return slots_of(sequence, block_size, device)[first_key:]


def _chunk_piece(
    rows: slice, sequence: BatchSequence, first_key: int, slots: slice | torch.Tensor, window: int | None,
    device: torch.device,
) -> _Piece:  # fmt: skip
    if sequence.start == 0 and (window is None or window >= sequence.kv_length):
        return _Piece(rows, 1, slots, is_causal=True, is_chunk=True)
    return _Piece(rows, 1, slots, visible(sequence, first_key, window, device), is_chunk=True)


def _group_piece(group: Sequence[tuple[int, torch.Tensor]]) -> _Piece:
    """Return one piece for a group of (row, slots).

    Pads each sequence's slots with its own first slot: masked keys are never another request's memory.
    """
    device = group[0][1].device
    lengths = torch.tensor([slots.shape[0] for _, slots in group], device=device)
    longest = int(lengths.max())
    padded = torch.stack([torch.cat([slots, slots[:1].expand(longest - len(slots))]) for _, slots in group])
    mask = (torch.arange(longest, device=device) < lengths[:, None])[:, None, None]  # [batch, 1, 1, longest]
    rows = torch.tensor([row for row, _ in group], device=device)
    whole = bool((lengths == longest).all())
    return _Piece(rows, len(group), padded.flatten(), None if whole else mask)
