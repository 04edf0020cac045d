"""Decode steps replayed from graphs: one launch instead of one per op.

    at load: every shape (rows, table width), largest first --capture--> its own fixed inputs and a graph
    a step of n sequences, one token each
      -> padded to the smallest captured shape that it fits
      -> inputs copied to that shape's fixed tensors in one upload; tables only if the graph reads them
      -> graph replayed
      -> logits of the first n rows

Padding rows write to spare blocks of the pool, each to its own slot. No graph is captured during requests: a step
that fits no captured shape is launched op by op, as are steps with prompt chunks. Ranks capture the same shapes
(engine/ranks/graph_capture.py), and all replay a step or none does.
"""

import time
from array import array
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from devices.interface import Device, Graph
from devices.out_of_memory import is_out_of_memory
from engine.attention.block_tables import DecodeInputs, HostTables, read_tables
from engine.attention.interface import AttentionBackend, DecodeAttention, GraphBackend, StepAttention
from engine.rope import StepRope
from engine.step import StepBatch
from engine.step_metadata import StepMetadata
from engine.transfers import upload
from telemetry.logs import EventLogger
from wire.errors import PdserveError

if TYPE_CHECKING:
    from engine.ranks.reduce import Reduce

_log = EventLogger("engine")
_EVERY = 8
_MAX_GRAPHS = 64
"""Each graph costs about two runs of the network at load, three with several ranks, and memory in the driver."""
_LINE_S = 2.0

Forward = Callable[[DecodeInputs, StepAttention], torch.Tensor]
"""Runs the network on the inputs and returns the logits of every row, [num_rows, vocab_size]."""
GraphShape = tuple[int, int]
"""Rows, and blocks of a row's table."""


def graph_shapes(backend: GraphBackend, most_rows: int, most_blocks: int, block_size: int) -> tuple[GraphShape, ...]:
    """Return the shapes to capture, in capture order: most rows first, then the widest tables.

    Sizes are 1, 2, 4 and every 8 rows up to `most_rows`; powers of two only if that would be more than 64 graphs.
    """
    for sizes in (_every_8(most_rows), _powers_of_two(most_rows)):
        shapes = [
            (rows, width) for rows in sizes for width in backend.table_widths(rows, most_blocks, block_size)
        ]  # fmt: skip
        if len(shapes) <= _MAX_GRAPHS:
            break
    return tuple(sorted(shapes, reverse=True))


def graph_rows(max_rows: int, device: Device, backend: AttentionBackend, rope: StepRope | None) -> int:
    """Return how many sequences a step with a graph may have, up to `max_rows`; 0 where graphs cannot be used.

    A RoPE that depends on lengths allows no graphs: the host passes the lengths at each step.
    """
    can = device.captures_graphs and isinstance(backend, GraphBackend) and rope is None
    return max_rows if can else 0


def num_spare_blocks(rows: int, block_size: int) -> int:
    """Return the number of blocks in which every row of a graph of up to `rows` rows has a slot of its own."""
    return -(-rows // block_size)


class ShapeOwner(Protocol):
    """Captures and drops single shapes: on one device, or on those of all ranks together."""

    def capture(self, shape: GraphShape) -> None:
        """Capture one shape. Raises any error of the network or the device; the shape then has no graph."""
        ...

    def drop(self, shape: GraphShape) -> None:
        """Forget one shape's graph, if it has one."""
        ...


@dataclass(slots=True)
class _Captured:
    """One graph and its inputs, all of them views of `packed`."""

    inputs: DecodeInputs
    packed: torch.Tensor  # [num_rows * (4 + width)] int64
    attention: DecodeAttention
    graph: Graph | None = None


class DecodeGraphs:
    """Owner of the graphs of one model. Called by one thread at a time."""

    def __init__(
        self, device: Device, backend: AttentionBackend, forward: Forward, *, block_size: int, spare_block: int,
        max_rows: int, max_blocks: int, reduce: "Reduce | None" = None,
    ) -> None:  # fmt: skip
        """Steps have `max_rows` sequences of `max_blocks` blocks at most.

        The pool has `num_spare_blocks` from `spare_block` on, which no sequence uses. `reduce` sums over the ranks.
        """
        assert isinstance(backend, GraphBackend), "graph_rows is 0 otherwise"
        self._device, self._backend, self._forward = device, backend, forward
        self._block_size, self._spare_block = block_size, spare_block
        self._max_rows, self._max_blocks, self._reduce = max_rows, max_blocks, reduce
        self._captured: dict[GraphShape, _Captured] = {}
        self._ascending: list[GraphShape] = []  # the keys of `_captured`
        self._logits: torch.Tensor | None = None  # [max_rows, vocab_size]: output of the last replay, shared

    @property
    def shapes(self) -> tuple[GraphShape, ...]:
        """All shapes to capture, in capture order. Rank 0's are those of all ranks."""
        return graph_shapes(self._backend, self._max_rows, self._max_blocks, self._block_size)

    def capture_all(self, ranks: ShapeOwner | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Capture every shape that has no graph yet, on all `ranks` if there are several. No step may be in flight.

        Shapes that do not fit the device's memory are left out, and after any other error there are no graphs; either
        is logged once, and not raised. Raises a PdserveError if a rank is lost.
        """
        owner: ShapeOwner = ranks or self
        began = shown = clock()
        free, left_out = self._device.memory().free, dict[GraphShape, str]()
        _log.info("graphs_capturing", graphs=len(self.shapes), rows=self._max_rows, device=self._device.name)
        while missing := [one for one in self.shapes if one not in self._captured and one not in left_out]:
            try:
                owner.capture(missing[0])
            except PdserveError:  # a rank is lost
                raise
            except Exception as error:  # noqa: BLE001 - from the network or a driver
                if not is_out_of_memory(error):
                    self._go_without(missing[0], error, owner)
                    return
                left_out[missing[0]] = one_line(error)  # the error itself refers to what the capture allocated
            if clock() - shown >= _LINE_S:
                shown = clock()
                _log.info("graphs_capturing", done=len(self._captured), graphs=len(self.shapes))
        for shape in self._captured.keys() - set(self.shapes):  # attention needs narrower tables now
            owner.drop(shape)
        if left_out:
            self._report_left_out(left_out)
        _log.info(
            "graphs_captured", graphs=len(self._captured), seconds=round(clock() - began, 3),
            bytes=free - self._device.memory().free,
        )  # fmt: skip

    @torch.inference_mode()
    def capture(self, shape: GraphShape, agree: Callable[[], None] | None = None) -> None:
        """See ShapeOwner. Ranks call it together: each calls `agree` after a first run without sums."""
        rows, width = shape
        packed = torch.zeros(rows * (4 + width), dtype=torch.int64, device=self._device.torch_device)
        tokens, positions, slots, lengths = packed[: 4 * rows].view(4, rows)
        inputs = DecodeInputs(
            self._block_size, tokens, positions, slots, lengths, packed[4 * rows :].view(rows, width)
        )  # fmt: skip
        captured = _Captured(inputs, packed, self._backend.plan_decode(inputs))
        none = np.empty(0, np.int64)
        host = self._padded(HostTables(none, none, none), rows)
        self._upload(captured, array("q"), array("q"), host)
        captured.attention.prepare(host)

        def run() -> None:
            made = self._forward(inputs, captured.attention.step())
            if self._logits is None:
                self._logits = made.new_empty(self._max_rows, made.shape[1])
            self._logits[:rows] = made

        captured.graph = self._device.capture(run if agree is None else self._alone_first(run, agree))
        self._captured[shape] = captured
        self._ascending = sorted(self._captured)

    def drop(self, shape: GraphShape) -> None:
        """See ShapeOwner."""
        self._captured.pop(shape, None)
        self._ascending = sorted(self._captured)

    def reset(self) -> None:
        """Forget all graphs, which may keep a communicator from being freed; none are used until captured again."""
        self._captured.clear()
        self._ascending = []
        self._logits = None

    def fits(self, batch: StepBatch) -> bool:
        """Return whether a graph can run this step: a graph returns only logits."""
        parts = batch.sequences
        if not parts or any(part.count != 1 for part in parts):
            return False
        longest = max(part.kv_length for part in parts)
        return self._find_shape(len(parts), -(-longest // self._block_size)) is not None

    def run(self, metadata: StepMetadata) -> torch.Tensor | None:
        """Return the logits of the step's sampled rows, [num_samples, vocab_size], or None if no graph can run it.

        They are a copy. `metadata.token_ids` is read on the device: the host need not know these tokens yet. Ranks call
        it for steps that fit (`fits`), and never get None: they all replay a step, so an error on one is raised.
        """
        packed = metadata.packed
        num_rows, shape = len(packed.kv_lengths), None
        if self._captured and num_rows and len(packed.slots) == num_rows:
            host = read_tables(packed, self._block_size)
            shape = self._find_shape(num_rows, int(host.used.max()))
        if shape is None:
            assert self._reduce is None, f"no graph for a step of {num_rows} rows that the other ranks replay"
            return None
        captured, host = self._captured[shape], self._padded(host, shape[0])
        try:
            self._upload(captured, packed.positions, packed.slots, host)
            captured.inputs.token_ids[:num_rows].copy_(metadata.token_ids[0])
            host_lengths = captured.attention.prepare(host)
        except Exception as error:
            if self._reduce is not None:
                raise
            if not is_out_of_memory(error):  # from a library or a driver; the step runs without a graph
                self._go_without(shape, error, self)
            return None
        assert captured.graph is not None
        assert self._logits is not None
        with nullcontext() if self._reduce is None else self._reduce.replaying():
            captured.graph.replay(host_lengths)
        return self._logits.index_select(0, metadata.sample_rows)

    def _alone_first(self, run: Callable[[], None], agree: Callable[[], None]) -> Callable[[], None]:
        """Return a function that calls `run`; its first call first runs it once without sums and waits for `agree`."""
        assert self._reduce is not None
        alone, first = self._reduce.alone, [agree]

        def run_alone_first() -> None:
            if first:
                with alone():
                    run()
                first.pop()()
            run()

        return run_alone_first

    def _find_shape(self, num_rows: int, width: int) -> GraphShape | None:
        """Return the smallest captured shape for a step of `num_rows` rows, whose longest table has `width` blocks."""
        return next((one for one in self._ascending if one[0] >= num_rows and one[1] >= width), None)

    def _padded(self, host: HostTables, rows: int) -> HostTables:
        """Return the step's tables with padding rows, in the spare blocks, up to `rows`."""
        return host.padded(rows, self._spare_block, self._block_size)

    def _upload(
        self, captured: _Captured, positions: "array[int]", slots: "array[int]", host: HostTables
    ) -> None:  # fmt: skip
        """Copy a step's inputs, all but its tokens, to the fixed tensors. `host` has the padding rows too."""
        rows, num_rows = len(host.used), len(slots)
        heads = np.zeros((4, rows), np.int64)
        heads[1, :num_rows] = positions
        heads[2, :num_rows] = slots
        heads[2, num_rows:] = self._spare_block * self._block_size + np.arange(rows - num_rows)
        heads[3] = host.kv_lengths
        staged = [heads.ravel()]
        if captured.graph is None or captured.attention.reads_tables:
            staged.append(host.rectangle(captured.inputs.tables.shape[1]).ravel())
        values = upload(torch.from_numpy(np.concatenate(staged)), captured.packed.device)
        captured.packed[: len(values)].copy_(values)

    def _go_without(self, shape: GraphShape, error: Exception, owner: ShapeOwner) -> None:
        """Drop all graphs, and log that."""
        for one in tuple(self._captured):
            owner.drop(one)
        self._logits = None
        rows, width = shape
        _log.warning("graphs_off", rows=rows, width=width, device=self._device.name, error=one_line(error))

    def _report_left_out(self, left_out: dict[GraphShape, str]) -> None:
        """Log which graphs the device has no memory for."""
        (rows, width), error = next(iter(left_out.items()))
        _log.warning(
            "graphs_limited", first_left_out_rows=rows, first_left_out_width=width, left_out=len(left_out),
            most_rows=self._most_captured, graphs=len(self._captured), device=self._device.name,
            free_bytes=self._device.memory().free, error=error,
        )  # fmt: skip

    @property
    def _most_captured(self) -> int:
        """Rows of the largest captured graph, 0 if there is none."""
        return max((rows for rows, _ in self._captured), default=0)


def _every_8(maximum: int) -> tuple[int, ...]:
    return (*(rows for rows in (1, 2, 4) if rows < maximum), *range(_EVERY, maximum, _EVERY), maximum)


def _powers_of_two(maximum: int) -> tuple[int, ...]:
    return (*(1 << power for power in range((maximum - 1).bit_length())), maximum)


def one_line(error: BaseException) -> str:
    """Return the error and its causes as one line."""
    line = f"{type(error).__name__}: {' '.join(str(error).split())}"
    cause = error.__cause__ or error.__context__
    return line if cause is None else f"{line} (caused by {one_line(cause)})"
