"""Working memory of a step of the fused decoder: rows of float32, as many as the largest step so far needs."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from engine.fused.structs import MAX_TILE_ROWS, PAIR, PANEL, SCRATCH_ROWS, Notify, StepStruct, padded

_GAP = 16  # floats between rows, so that rows of a power of two do not map to the same cache lines


@dataclass(frozen=True, slots=True)
class RowSizes:
    """Floats of one row of each buffer."""

    hidden: int
    qkv: int
    attended: int
    inner: int
    logits: int


class StepMemory:
    """Owns the buffers and the struct that points to them; one step at a time uses them."""

    def __init__(self, sizes: RowSizes, num_threads: int) -> None:
        self._scratch_rows = num_threads * SCRATCH_ROWS
        self._sizes = sizes
        self.step = StepStruct()
        self._rows = self._samples = self._passing = 0
        self.reserve(1, 1)

    def reserve(self, num_rows: int, num_samples: int) -> None:
        """Reserve memory; a buffer that has to grow loses its contents. Growing only `num_samples` keeps the rows."""
        if num_rows > self._rows:
            self._rows = num_rows + num_rows // 4
            self._make_rows()
        if max(num_rows, num_samples) > self._passing:
            self._make_passing(max(self._rows, num_samples))
        if num_samples > self._samples:
            self._samples = num_samples
            self.logits = _rows(num_samples, padded(self._sizes.logits, PAIR))
            self.given_shape, self.given = (0, 0), self.logits[:0, :0]
            self.step.logits, self.step.logits_stride = self.logits.data_ptr(), self.logits.stride(0)
        self.step.num_rows, self.step.num_samples = num_rows, num_samples

    def logits_of(self, num_samples: int, vocab_size: int) -> torch.Tensor:
        """Return the part [num_samples, vocab_size] of the logits; the same tensor until the shape changes."""
        if self.given_shape != (num_samples, vocab_size):
            self.given_shape, self.given = (num_samples, vocab_size), self.logits[:num_samples, :vocab_size]
        return self.given

    def place_of(self, scores: torch.Tensor) -> tuple[int, int, int, int]:
        """Return address, rows, columns and row stride (in floats) of [rows, columns] float32.

        Makes no torch call if `scores` are those of the last `logits_of`, the usual case.
        """
        if scores is self.given:
            return self.step.logits, *self.given_shape, self.step.logits_stride
        return scores.data_ptr(), scores.shape[0], scores.shape[1], scores.stride(0)

    def notifying(self, layer_done: Callable[[int], None] | None) -> AbstractContextManager[None]:
        """Let NOTIFY call `layer_done` in this block, until `layer_done` raises; the block's end raises that error."""
        return nullcontext() if layer_done is None else self._on_layer_done(layer_done)

    @contextmanager
    def _on_layer_done(self, layer_done: Callable[[int], None]) -> Iterator[None]:
        errors: list[BaseException] = []

        def notify(layer: int) -> None:
            if errors:
                return
            try:
                layer_done(layer)
            except BaseException as error:  # noqa: BLE001 - errors must not propagate through C
                errors.append(error)

        self.step.notify = Notify(notify)
        try:
            yield
        finally:
            self.step.notify = Notify()
        if errors:
            raise errors[0]

    def _make_rows(self) -> None:
        sizes, step, rows = self._sizes, self.step, self._rows
        hidden, qkv, inner = (padded(size, PAIR) + _GAP for size in (sizes.hidden, sizes.qkv, sizes.inner))
        self.x, self.partial = _rows(rows, hidden), _rows(rows, hidden)
        self.qkv, self.inner = _rows(rows, qkv), _rows(rows, inner)
        self.attended = _rows(rows, padded(sizes.attended, PANEL) + _GAP)
        step.x, step.partial = self.x.data_ptr(), self.partial.data_ptr()
        step.qkv, step.inner, step.attended = self.qkv.data_ptr(), self.inner.data_ptr(), self.attended.data_ptr()
        step.hidden_stride, step.qkv_stride, step.inner_stride = hidden, qkv, inner
        step.attended_stride = self.attended.stride(0)

    def _make_passing(self, rows: int) -> None:
        """Allocate the buffers for a product's converted inputs: rows of the step, or its sampled rows."""
        sizes, step = self._sizes, self.step
        self._passing = max(rows, self._scratch_rows)
        self.scratch = _rows(self._passing, padded(sizes.hidden, PAIR) + _GAP)
        widest = padded(max(sizes.hidden, sizes.attended, sizes.inner), PAIR) + 2 * _GAP
        self.narrow = _rows(self._passing + MAX_TILE_ROWS, widest, torch.bfloat16)
        step.scratch = self.scratch.data_ptr()
        step.narrow, step.narrow_stride, step.passing_rows = self.narrow.data_ptr(), widest, self._passing


def _rows(count: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with torch.inference_mode(mode=False):  # tensors made in inference mode cannot be written outside it
        return torch.zeros(count, size, dtype=dtype)
