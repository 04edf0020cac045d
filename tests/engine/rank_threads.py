"""Ranks as threads of one test process: an all-reduce that adds in their order, and what each rank's work returns."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from engine.sharding.hooks import AllReduce

T = TypeVar("T")
_WAIT_S = 300.0


class ThreadReduce:
    """Owns the tensors of one sum at a time. Every rank must call it, in the same order."""

    def __init__(self, num_ranks: int) -> None:
        self._tensors: list[torch.Tensor | None] = [None] * num_ranks
        self._barrier = threading.Barrier(num_ranks, timeout=_WAIT_S)
        self.num_sums = 0

    def of(self, rank: int) -> AllReduce:
        """Return what this rank calls."""

        def all_reduce(tensor: torch.Tensor) -> None:
            self._tensors[rank] = tensor
            self._barrier.wait()
            total = torch.stack([one for one in self._tensors if one is not None]).sum(0)
            self._barrier.wait()
            tensor.copy_(total)
            self.num_sums += rank == 0

        return all_reduce

    def abort(self) -> None:
        """Release the ranks that wait for one that failed."""
        self._barrier.abort()


def run_ranks(num_ranks: int, work: Callable[[int, AllReduce], T]) -> list[T]:
    """Run `work(rank, all_reduce)` for all ranks at once; raise the first error not caused by another rank's."""
    reduce = ThreadReduce(num_ranks)

    def run(rank: int) -> T:
        try:
            with torch.inference_mode():
                return work(rank, reduce.of(rank))
        except BaseException:
            reduce.abort()
            raise

    with ThreadPoolExecutor(num_ranks) as pool:
        futures = [pool.submit(run, rank) for rank in range(num_ranks)]
        errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return [future.result() for future in futures]
