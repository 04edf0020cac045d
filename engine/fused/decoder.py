"""A whole network of the Llama family on native kernels: embedding, layers, logits of the rows that are sampled.

One native call runs a program (native/layer.h): the whole step, if attention is native too. If attention, or the sum
over ranks, is done in Python, the program is split into segments:

    native    [ENTER 0, NOTIFY 0, ATTEND 0, OUT 0, MLP 0, ENTER 1, ... MLP n, HEAD]
    else      [ENTER 0] -> attend -> [OUT 0, MLP 0, ENTER 1] -> attend -> ... -> [OUT n, MLP n]            then [HEAD]
    ranks     [ENTER 0 ... OUT 0] -> reduce -> [ADD, MLP 0] -> reduce -> [ADD, ENTER 1 ... OUT 1] -> ...
"""

import ctypes
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import embedding

from engine.attention.cpu import CpuAttention
from engine.attention.interface import AttentionBackend, AttentionOptions, StepAttention
from engine.attention.paged import LayerPool
from engine.fused.memory import RowSizes, StepMemory
from engine.fused.program import instructions, segments, whole
from engine.fused.structs import (
    FORMATS,
    PANEL,
    DecoderFault,
    DecoderStruct,
    Functions,
    Instruction,
    LayerStruct,
    Operation,
    address,
)
from engine.fused.weights import PackedMemory
from engine.rope_table import RopeTable
from engine.sampling.native_chooser import NativeChooser
from engine.step_metadata import StepMetadata
from native.attention import AttentionMemory, step_of
from native.engine_library import Threads

Reduce = Callable[[torch.Tensor], None]
"""Sums a tensor over all ranks, in place."""
LayerDone = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class FusedWeights:
    """All parts of a fused network. `embedding` is None if the packed output layer is also the embedding."""

    layers: ctypes.Array[LayerStruct]
    decoder: DecoderStruct
    options: list[AttentionOptions]  # of each layer
    sizes: RowSizes
    vocab_size: int
    dtype: torch.dtype
    embedding: torch.Tensor | None
    rope: RopeTable
    memory: PackedMemory  # owns the memory that the structs point to
    functions: Functions
    threads: Threads


class FusedDecoder:
    """Runs steps over one pool. Owns the step's memory; one thread calls it."""

    def __init__(
        self, weights: FusedWeights, pools: Sequence[LayerPool], backend: AttentionBackend, *,
        reduce: Reduce | None = None,
    ) -> None:  # fmt: skip
        """`reduce` is set if each of several ranks has a part of the weights.

        The backend computes attention, except CpuAttention, whose kernel runs inside the program.
        """
        self._weights, self._pools, self._backend, self._reduce = weights, tuple(pools), backend, reduce
        self._memory = StepMemory(weights.sizes, weights.threads.count)
        self._attention = AttentionMemory(weights.threads) if isinstance(backend, CpuAttention) else None
        decoder, keys = weights.decoder, pools[0].keys
        for layer, pool in zip(weights.layers, pools, strict=True):
            layer.keys, layer.values = pool.keys.data_ptr(), pool.values.data_ptr()
        self._num_slots = len(keys)
        decoder.pool_format, decoder.num_slots, decoder.partial = FORMATS[keys.dtype], len(keys), reduce is not None
        inside = self._attention is not None
        self._segments = tuple(segments(len(pools), attends_inside=inside, partial=reduce is not None))
        self._head = instructions([(Operation.HEAD, 0)])
        self._whole = None if len(self._segments) > 1 else whole(len(pools))
        if self._attention is not None:
            self._memory.step.attention = self._attention.address
        self.chooser = NativeChooser(
            weights.functions.best, weights.functions.draw, weights.threads, self._memory.place_of
        )

    def run(self, metadata: StepMetadata, layer_done: LayerDone | None = None) -> torch.Tensor:
        """Compute a step; return the logits of its sampled rows, [num_samples, vocab_size] float32.

        They are valid until the next call.
        """
        rows = metadata.packed.sample_rows
        if self._whole is None or not rows or len(set(rows)) < len(rows):
            self._run_layers(metadata, layer_done)
            return self.logits(rows)
        self._begin(metadata)
        self._plan(metadata)
        self._set_samples(rows)
        with self._memory.notifying(layer_done):
            self._call(self._whole)
        return self._memory.logits_of(len(rows), self._weights.vocab_size)

    def _run_layers(self, metadata: StepMetadata, layer_done: LayerDone | None) -> None:
        """Compute the layers; `layer_done(layer)` is called when a layer's KV is written, before its attention."""
        num_rows = self._begin(metadata)
        with torch.inference_mode(), self._memory.notifying(layer_done):
            attention = self._plan(metadata)
            for segment in self._segments:
                self._call(segment.instructions)
                if attention is not None and segment.attends:
                    if layer_done is not None:
                        layer_done(segment.layer)
                    self._attend(attention, segment.layer, num_rows)
                if self._reduce is not None and segment.reduces:
                    self._reduce(self._memory.partial[:num_rows])

    def close(self) -> None:
        """Drop the references to the pool; a later step would be refused. Idempotent."""
        self._pools = ()
        self._weights.decoder.num_slots = 0
        for layer in self._weights.layers:
            layer.keys = layer.values = None

    @property
    def rows(self) -> torch.Tensor:
        """The last norm's input: [rows with reserved memory, hidden] float32, valid until the next call."""
        return self._memory.x[:, : self._weights.sizes.hidden]

    def run_layer(self, layer: int, metadata: StepMetadata, rows: torch.Tensor) -> torch.Tensor:
        """Compute only one layer: [num_tokens, hidden] in, the same shape in float32 out, valid until the next call."""
        num_rows = self._point_at(metadata)
        self.load_rows(rows)
        self._call(instructions([(Operation.ENTER, layer)]))
        self._attend(self._backend.plan(metadata), layer, num_rows)
        self._call(instructions([(Operation.OUT, layer), (Operation.MLP, layer)]))
        return self._memory.x[:num_rows, : self._weights.sizes.hidden]

    def load_rows(self, rows: torch.Tensor) -> None:
        """Set the layers' output to `rows` [num_tokens, hidden]."""
        self._memory.reserve(len(rows), 1)
        self._memory.x[: len(rows), : rows.shape[1]] = rows

    def logits(self, rows: "array[int]") -> torch.Tensor:
        """Return the logits of rows (n, int64) of the last step, [n, vocab_size] float32, valid until the next call.

        A row that occurs several times, as for the sequences of one prompt, is computed once.
        """
        if not rows:
            return torch.empty(0, self._weights.vocab_size)
        if len(set(rows)) == len(rows):
            return self._distinct_logits(rows)
        places = {row: place for place, row in enumerate(dict.fromkeys(rows))}
        return self._distinct_logits(array("q", places))[[places[row] for row in rows]]

    def _distinct_logits(self, rows: "array[int]") -> torch.Tensor:
        self._set_samples(rows)
        self._call(self._head)
        return self._memory.logits_of(len(rows), self._weights.vocab_size)

    def _set_samples(self, rows: "array[int]") -> None:
        step = self._memory.step
        self._memory.reserve(step.num_rows, len(rows))
        step.sample_rows = rows.buffer_info()[0]

    def _begin(self, metadata: StepMetadata) -> int:
        """Set the step's input pointers and embed its tokens; return the number of its rows."""
        num_rows = self._point_at(metadata)
        self._embed(metadata.packed.token_ids, num_rows)
        metadata.embed(self.rows, self._weights.dtype)
        return num_rows

    def _point_at(self, metadata: StepMetadata) -> int:
        """Set the step's input pointers; return the number of its rows."""
        step, rope, packed = self._memory.step, self._weights.rope, metadata.packed
        num_rows = len(packed.token_ids)
        self._memory.reserve(num_rows, 1)
        rope.reserve(max(packed.kv_lengths))
        self._angles, self._positions = (rope.cosine, rope.sine), packed.positions
        if metadata.grid is not None:  # a table with a row for each token
            self._angles, self._positions = rope.at_grid(metadata.grid), array("q", range(num_rows))
        cosine, sine = self._angles
        step.cosine, step.sine, step.num_positions = cosine.data_ptr(), sine.data_ptr(), len(cosine)
        step.positions, step.slots = self._positions.buffer_info()[0], packed.slots.buffer_info()[0]
        return num_rows

    def _plan(self, metadata: StepMetadata) -> StepAttention | None:
        """Return the step's attention; None if the program computes it."""
        if self._attention is None:
            return self._backend.plan(metadata)
        packed = metadata.packed
        self._sequences = step_of(
            packed.query_ends, packed.kv_lengths, packed.table_ends, packed.blocks, packed.slots,
            block_size=metadata.block_size, num_blocks=self._num_slots // metadata.block_size,
        )  # fmt: skip
        self._memory.step.sequences = address(self._sequences)
        return None

    def _embed(self, tokens: "array[int]", num_rows: int) -> None:
        weights, x, step = self._weights, self._memory.x, self._memory.step
        if weights.sizes.hidden % PANEL:  # values left by an earlier step, such as NaN, must not affect this one
            x[:num_rows, weights.sizes.hidden :] = 0
        if weights.embedding is not None:
            with torch.inference_mode():
                ids = torch.frombuffer(tokens, dtype=torch.int64)
                x[:num_rows, : weights.sizes.hidden] = embedding(ids, weights.embedding)
            return
        fault = weights.functions.embed(
            weights.threads.address, address(weights.decoder.head), tokens.buffer_info()[0], num_rows, step.x,
            step.hidden_stride,
        )  # fmt: skip
        if fault:
            outside = next(token for token in tokens if not 0 <= token < weights.vocab_size)
            raise IndexError(f"token id {outside} is outside a vocabulary of {weights.vocab_size}")

    def _attend(self, attention: StepAttention, layer: int, num_rows: int) -> None:
        decoder, memory, pool = self._weights.decoder, self._memory, self._pools[layer]
        columns = decoder.num_heads * decoder.head_dim
        query = memory.qkv[:num_rows, :columns].view(num_rows, decoder.num_heads, decoder.head_dim)
        out = attention.attend(
            query.to(self._weights.dtype).transpose(0, 1), pool.keys, pool.values, self._weights.options[layer]
        )
        memory.attended[:num_rows, :columns] = out.flatten(1)

    def _call(self, program: ctypes.Array[Instruction]) -> None:
        weights = self._weights
        fault = weights.functions.run(
            weights.threads.address, address(weights.decoder), address(self._memory.step), address(program),
            len(program),
        )  # fmt: skip
        if fault == DecoderFault.INDEX:
            raise IndexError("a slot, position or row of the step is outside its table")
        if fault:
            raise ValueError(f"the native program was refused: fault {fault}")
