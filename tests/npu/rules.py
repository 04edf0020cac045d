"""What torch_npu's documents forbid (the wheel's _op_plugin_docs.py): the CPU references refuse it with these texts."""

from collections.abc import Sequence

import torch


class Refused(RuntimeError):
    """A call that the documents do not allow; on an NPU it fails or computes wrong results."""


def need(holds: bool, words: str) -> None:
    """Raise Refused unless the condition holds."""
    if not holds:
        raise Refused(words)


def need_contiguous(**tensors: torch.Tensor | None) -> None:
    """Raise Refused for a view with gaps or another order."""
    for name, tensor in tensors.items():
        need(tensor is None or tensor.is_contiguous(), f"{name} is not contiguous")


def need_dtype(allowed: Sequence[torch.dtype], **tensors: torch.Tensor | None) -> None:
    """Raise Refused for another dtype."""
    for name, tensor in tensors.items():
        if tensor is not None:
            need(tensor.dtype in allowed, f"{name} is {tensor.dtype}: must be one of {list(allowed)}")


def need_shape(name: str, tensor: torch.Tensor, wanted: Sequence[int]) -> None:
    """Raise Refused for another shape."""
    need(list(tensor.shape) == list(wanted), f"{name} is {list(tensor.shape)}: must be {list(wanted)}")


def need_unused(given: dict[str, object]) -> None:
    """Raise Refused for an argument that no reference implements: add it before using the argument."""
    used = [name for name, value in given.items() if value is not None]
    need(not used, f"no reference for {', '.join(used)}")
