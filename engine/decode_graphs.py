"""Decode steps replayed from graphs: one launch instead of one per op.

    step of n sequences, one token each
      -> padded to one of `graph_sizes` rows, block tables to a width that the attention backend chooses
      -> inputs copied to the fixed tensors of that (rows, width); tables only if the graph reads them
      -> captured on first use, replayed from then on
      -> logits of the first n rows

Padding rows write to spare blocks of the pool, each to its own slot. Steps with prompt chunks never use graphs. After a
failed graph, none are used; if it only ran out of memory, captured graphs stay in use and none of its size or larger is
captured.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from devices.interface import Device, Graph
from devices.out_of_memory import is_out_of_memory
from engine.attention.interface import AttentionBackend, DecodeAttention, GraphBackend, StepAttention
from engine.attention.tables import DecodeInputs, HostTables, read_tables
from engine.rope import StepRope
from engine.step_metadata import StepMetadata
from engine.transfers import upload
from telemetry.logs import EventLogger

_log = EventLogger("engine")
_SMALL = (1, 2, 4)
_EVERY = 8

Forward = Callable[[DecodeInputs, StepAttention], torch.Tensor]
"""Runs the network on the inputs and returns the logits of every row, [num_rows, vocab_size]."""


def graph_sizes(most: int) -> tuple[int, ...]:
    """Return the batch sizes that steps are padded to, ascending; the last is `most` (1 or more)."""
    return (*(size for size in _SMALL if size < most), *range(_EVERY, most, _EVERY), most)


def graph_rows(most: int, device: Device, backend: AttentionBackend, rope: StepRope | None) -> int:
    """Return the most sequences in a step that uses a graph, up to `most`; 0 where graphs cannot be used.

    No graphs with a RoPE that depends on lengths: the host passes those at each step.
    """
    can = device.captures_graphs and isinstance(backend, GraphBackend) and rope is None
    return most if can else 0


def num_spare_blocks(rows: int, block_size: int) -> int:
    """Return the blocks in which every row of a graph of up to `rows` rows has a slot of its own."""
    return -(-rows // block_size)


@dataclass(slots=True)
class _Captured:
    """One graph and its inputs, all of them views of `packed`."""

    inputs: DecodeInputs
    packed: torch.Tensor  # [num_rows * (4 + width)] int64
    attention: DecodeAttention
    graph: Graph | None = None


class DecodeGraphs:
    """Owner of the graphs of one model. One thread calls it."""

    def __init__(
        self, device: Device, backend: AttentionBackend, forward: Forward, *, block_size: int, spare_block: int,
        max_rows: int, max_blocks: int,
    ) -> None:  # fmt: skip
        """Steps have `max_rows` sequences of `max_blocks` blocks at most; none uses the spare ones."""
        assert isinstance(backend, GraphBackend), "graph_rows is 0 otherwise"
        self._device, self._backend, self._forward = device, backend, forward
        self._block_size, self._spare_block, self._max_blocks = block_size, spare_block, max_blocks
        self._sizes = graph_sizes(max_rows)
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._logits: torch.Tensor | None = None  # [max_rows, vocab_size]: output of the last replay, shared
        self._failed = False
        self._most_rows = max_rows
        """The largest size that may still be captured."""

    def run(self, metadata: StepMetadata) -> torch.Tensor | None:
        """Return the logits of the step's sampled rows, [num_samples, vocab_size], or None if no graph can run it.

        They are a copy. `metadata.token_ids` is read on the device: the host need not know these tokens yet.
        """
        packed = metadata.packed
        num_rows = len(packed.kv_lengths)
        if self._failed or len(packed.slots) != num_rows or not 0 < num_rows <= self._sizes[-1]:
            return None
        host = self._padded(metadata)
        needed, size = int(host.used.max()), len(host.used)
        width = self._backend.table_width(needed, max(needed, self._max_blocks))
        captured = self._captured.get((size, width))
        if captured is None and size > self._most_rows:
            return None
        try:
            if captured is None:
                captured = self._make(size, width)
            self._fill(captured, metadata, host)
            host_lengths = captured.attention.prepare(host)
            if captured.graph is None:
                self._capture(captured)
        except Exception as error:  # noqa: BLE001 - from the network or a driver; the step runs without a graph
            self._go_without(size, width, error)
            return None
        assert captured.graph is not None
        assert self._logits is not None
        captured.graph.replay(host_lengths)
        return self._logits.index_select(0, metadata.sample_rows)

    def _padded(self, metadata: StepMetadata) -> HostTables:
        """Return the step's tables padded to a graph's size, with padding rows in the spare blocks."""
        host = read_tables(metadata.packed, self._block_size)
        size = next(size for size in self._sizes if size >= len(host.used))
        return host.padded(size, self._spare_block, self._block_size)

    def _make(self, size: int, width: int) -> _Captured:
        packed = torch.zeros(size * (4 + width), dtype=torch.int64, device=self._device.torch_device)
        tokens, positions, slots, lengths = packed[: 4 * size].view(4, size)
        tables = packed[4 * size :].view(size, width)
        inputs = DecodeInputs(self._block_size, tokens, positions, slots, lengths, tables)
        return _Captured(inputs, packed, self._backend.plan_decode(inputs))

    def _fill(self, captured: _Captured, metadata: StepMetadata, host: HostTables) -> None:
        """Upload the step's inputs to the fixed tensors in one copy; token ids are copied on the device."""
        packed, size = metadata.packed, len(host.kv_lengths)
        num_rows = len(packed.slots)
        heads = np.zeros((4, size), np.int64)
        heads[1, :num_rows] = packed.positions
        heads[2, :num_rows] = packed.slots
        heads[2, num_rows:] = self._spare_block * self._block_size + np.arange(size - num_rows)
        heads[3] = host.kv_lengths
        staged = [heads.ravel()]
        if captured.graph is None or captured.attention.reads_tables:
            staged.append(host.rectangle(captured.inputs.tables.shape[1]).ravel())
        values = upload(torch.from_numpy(np.concatenate(staged)), captured.packed.device)
        captured.packed[: len(values)].copy_(values)
        captured.inputs.token_ids[:num_rows].copy_(metadata.token_ids[0])

    def _capture(self, captured: _Captured) -> None:
        """Capture the step. Raises any error of the network or the device."""
        size, width = captured.inputs.tables.shape

        def run() -> None:
            made = self._forward(captured.inputs, captured.attention.step())
            if self._logits is None:
                self._logits = made.new_empty(self._sizes[-1], made.shape[1])
            self._logits[:size] = made

        captured.graph = self._device.capture(run)
        self._captured[size, width] = captured
        _log.info("graph_captured", rows=size, width=width, graphs=len(self._captured))

    def _go_without(self, size: int, width: int, error: Exception) -> None:
        """Stop using graphs for steps that would fail as this one did, and log that once."""
        if is_out_of_memory(error):
            self._stay_below(size, width, error)
            return
        self._failed = True
        self._captured.clear()
        _log.warning("graphs_off", rows=size, width=width, device=self._device.name, error=_one_line(error))

    def _stay_below(self, size: int, width: int, error: Exception) -> None:
        """Capture no more graphs of this size or larger."""
        log = _log.warning if self._most_rows == self._sizes[-1] else _log.info
        self._most_rows = size - 1
        log(
            "graphs_limited", rows=size, width=width, most_rows=self._most_captured, graphs=len(self._captured),
            device=self._device.name, free_bytes=self._device.memory().free, error=_one_line(error),
        )  # fmt: skip

    @property
    def _most_captured(self) -> int:
        """Rows of the largest captured graph, 0 if there is none."""
        return max((size for size, _ in self._captured), default=0)


def _one_line(error: BaseException) -> str:
    """Return the error and its causes as one line."""
    line = f"{type(error).__name__}: {' '.join(str(error).split())}"
    cause = error.__cause__ or error.__context__
    return line if cause is None else f"{line} (caused by {_one_line(cause)})"
