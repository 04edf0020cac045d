"""The peak bytes held by tensors created since a start: what a card's allocator reports."""

import threading
import weakref
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class HeldBytes:
    """Counts the storages of tensors given to `hold`, each once and as long as one of its tensors lives."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a tensor may be freed while another is registered
        self._tensors: Counter[int] = Counter()
        self._bytes: dict[int, int] = {}
        self.now = self.peak = 0

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage is counted."""
        return tensor.untyped_storage().data_ptr() in self._bytes

    def hold(self, tensor: torch.Tensor, owner: object) -> None:
        """Count the tensor's storage until `owner` is freed."""
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if not size:
            return
        with self._lock:
            self._tensors[place] += 1
            if self._tensors[place] == 1:
                self._bytes[place] = size
                self.now += size
                self.peak = max(self.peak, self.now)
        weakref.finalize(owner, self._drop, place)

    def _drop(self, place: int) -> None:
        with self._lock:
            self._tensors[place] -= 1
            if not self._tensors[place]:
                self.now -= self._bytes.pop(place)


class HeldByOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context in which `held` counts new results of operations; their internal scratch memory is not seen."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = HeldBytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        others = {one.untyped_storage().data_ptr() for one in given if not self.held.knows(one)}
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() not in others:
                self.held.hold(one, one)
        return made
