"""The sum over all ranks that a network's layers call, and the callback after each sum of a step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch

from engine.ranks.stream_sum import StreamSum
from engine.ranks.sums import ReduceFailed

Sum = Callable[[torch.Tensor], None]
"""Adds up a contiguous tensor over the ranks, in place."""


class Reduce:
    """One rank's side; owns the count of this step's sums. One thread calls it.

    Before `connect` nothing is summed: the probe of shapes runs on each rank alone. `sums_per_pass`: how often a
    forward pass sums, set once the network is cut.
    """

    def __init__(self) -> None:
        self._sum: Sum | None = None
        self._after: Callable[[], None] | None = None
        self._explain: Callable[[str], Exception] | None = None
        self.num_sums = self.sums_per_pass = 0

    @property
    def stream(self) -> StreamSum | None:
        """The sums on a device's stream, which are not done when they return; None for any other sums."""
        return self._sum if isinstance(self._sum, StreamSum) else None

    def connect(self, add_up: Sum) -> None:
        """Use `add_up` for all later sums."""
        self._sum = add_up

    def explain_by(self, explain: Callable[[str], Exception]) -> None:
        """When a sum fails, raise the error that `explain` returns for the reason, within the same step."""
        self._explain = explain

    def begin(self, after: Callable[[], None] | None = None) -> None:
        """Start a step; `after` is called after each of its sums."""
        self.num_sums, self._after = 0, after

    def __call__(self, tensor: torch.Tensor) -> None:
        """Add up `tensor` over all ranks, in place. Raises ReduceFailed, or the error of `explain`, on failure."""
        if self._sum is None:
            return
        flat = tensor.contiguous()
        try:
            self._sum(flat)
        except ReduceFailed as error:
            self._fail(error)
        if flat is not tensor:
            tensor.copy_(flat)
        self.num_sums += 1
        if self._after is not None:
            self._after()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Sum nothing in this block: this rank computes by itself."""
        add_up, self._sum = self._sum, None
        try:
            yield
        finally:
            self._sum = add_up

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Launch a graph of a forward pass in this block, with all its sums at once. Raises as a sum does."""
        assert self.stream is not None, "a graph contains sums that stay on the stream"
        try:
            self.stream.expect(self.sums_per_pass)
        except ReduceFailed as error:
            self._fail(error)
        yield
        self.num_sums += self.sums_per_pass

    def catch_up(self, num_sums: int) -> None:
        """Count the sums up to `num_sums` that this rank did not run, so that it does not seem to be behind."""
        assert self.stream is not None
        self.stream.expect(num_sums - self.num_sums)

    def close(self) -> None:
        """Disconnect from the other ranks. Idempotent."""
        self._sum = None

    def _fail(self, error: ReduceFailed) -> NoReturn:
        if self._explain is None:
            raise error
        raise self._explain(str(error)) from error
