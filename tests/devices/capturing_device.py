"""The fake device with graphs like a card's: operations are recorded with their tensors, and no Python runs
at a replay.

A capture records each operation and the tensors it reads and writes; a replay computes them again, in place. So values
that came from the host stay as they were at the capture, and a tensor that is created for each step is not read. What
a card cannot capture raises: reading a tensor's value on the host, shapes that depend on values, copying values from
the host. Results of the capture itself are overwritten after it, as a card computes nothing then.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from devices.interface import Traits
from tests.devices.fake_device import TRAITS, FakeDevice

_NEVER = ("item", "_local_scalar_dense", "is_nonzero", "nonzero", "lift_fresh", "masked_select", "_unique2")


@dataclass
class CapturingDevice(FakeDevice):
    """Implements Device. `replays` counts replays; `fails` is the error that a capture raises, if any."""

    traits: Traits = field(
        default_factory=lambda: Traits(
            kind="fake", visible_variable=None, collective="gloo", block_size=16, prefill_chunk_size=64,
            pool_alignment=TRAITS.pool_alignment, attention="cuda",
        )
    )  # fmt: skip
    captures_graphs: bool = True
    captured: int = 0
    replays: int = 0
    fails: str | None = None

    def capture(self, run: Callable[[], None]) -> "RecordedGraph":
        run()
        if self.fails is not None:
            raise RuntimeError(self.fails)
        with Recorder() as recorder:
            run()
        recorder.overwrite()
        self.captured += 1
        return RecordedGraph(self, recorder)


class RecordedGraph:
    """Implements Graph."""

    def __init__(self, device: CapturingDevice, recorder: "Recorder") -> None:
        self._device, self._recorder = device, recorder

    def replay(self, host_lengths: dict[str, list[int]] | None = None) -> None:
        if host_lengths:
            raise ValueError(f"no operation took {sorted(host_lengths)} from the host")
        self._device.replays += 1
        self._recorder.replay()


@dataclass
class _Call:
    function: Any
    args: Any
    kwargs: Any
    made: list[torch.Tensor]
    is_new: list[bool]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operation. A result is new where it shares no memory with the operation's arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[_Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name in _NEVER:
            raise RuntimeError(f"{name} cannot be captured")
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        read = {one.untyped_storage().data_ptr() for one in _tensors((args, kwargs))}
        made = _tensors(out)
        self._calls.append(
            _Call(func, args, kwargs, made, [one.untyped_storage().data_ptr() not in read for one in made])
        )
        return out

    def record(self, function: Callable[[torch.Tensor], None], tensor: torch.Tensor) -> None:
        """Add work that is not a torch operation: it runs at each replay, and not now."""
        self._calls.append(_Call(function, (tensor,), {}, [], []))

    def overwrite(self) -> None:
        """Overwrite new results with a value that no step computes."""
        for call in self._calls:
            for tensor in _new_tensors(call):
                tensor.fill_(float("nan") if tensor.is_floating_point() else 1)

    def replay(self) -> None:
        """Compute all again, from the tensors' current values, into the recorded results."""
        for call in self._calls:
            again = _tensors(call.function(*call.args, **call.kwargs))
            for old, new, is_new in zip(call.made, again, call.is_new, strict=True):
                if is_new and old.numel():
                    old.copy_(new)


def _new_tensors(call: _Call) -> list[torch.Tensor]:
    return [tensor for tensor, is_new in zip(call.made, call.is_new, strict=True) if is_new]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]
