"""A torch device in this process whose tensors are not the CPU's: code that treats them as host tensors fails.

torch reserves one device type for extensions, PrivateUse1. Here each of its tensors holds a CPU tensor, and every op on
them checks what a real card would check: a host tensor beside them is refused, and numpy cannot read them. Each copy to
the host and from it is counted, with the function of the product that made it. An asynchronous copy to the host holds
garbage until the host has waited for an event recorded after it, or for the card.
"""

import gc
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils.backend_registration import _DummyDeviceGuard

from tests.devices.held_bytes import HeldBytes

_REPOSITORY = Path(__file__).parents[2]
_ATEN = torch.ops.aten
_CROSSING = frozenset({_ATEN.copy_.default, _ATEN._to_copy.default})
"""Ops that take tensors of host and card together."""
_READS = frozenset(
    {
        _ATEN._local_scalar_dense.default, _ATEN.equal.default, _ATEN.is_nonzero.default, _ATEN.masked_select.default,
        _ATEN.nonzero.default, _ATEN._unique2.default, _ATEN.unique_dim.default, _ATEN.unique_consecutive.default,
        _ATEN.repeat_interleave.Tensor,
    }
)  # fmt: skip
"""Ops for whose result, or for its size, the host has to wait."""


@dataclass(slots=True)
class CopyCounts:
    """Number of copies between host and card by the function that made them, as "engine/sampling/sampler.py:best".

    The host waits for `reads`, for `waited_uploads` (which real cards run after all work before them), and for
    `downloads` when it needs them.
    """

    reads: Counter[str] = field(default_factory=Counter)
    waited_uploads: Counter[str] = field(default_factory=Counter)
    downloads: Counter[str] = field(default_factory=Counter)
    uploads: Counter[str] = field(default_factory=Counter)


class CardTensor(torch.Tensor):
    """A tensor of the card. `held` is the CPU tensor with its values."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "CardTensor":
        made: CardTensor = torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=torch_device(), requires_grad=False,
        )  # fmt: skip
        made.held = held
        if _peak is not None and (_peak.knows(held) or held.untyped_storage().data_ptr() not in _before):
            _peak.hold(held, made)
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"CardTensor({list(self.shape)}, {self.dtype})"

    def tolist(self) -> Any:
        """torch does not allow it for subclasses."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is a static function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = list(_tensors((args, kwargs)))
        _check(func, tensors)
        made = func.decompose(*args, **kwargs)  # composite ops, which inference mode passes on undecomposed
        if made is not NotImplemented:
            return made
        requested = kwargs.get("device")
        to_host = requested is not None and torch.device(requested).type == "cpu"
        if func is _ATEN.copy_.default:
            return _copy(*args[:2], non_blocking=args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if func in _READS or (func is _ATEN._to_copy.default and to_host) or _picks_by_mask(func, args):
            _note(_copies.reads)
        known = {id(one.held): one for one in tensors if isinstance(one, CardTensor)}
        made = _on_cpu(func, _held(args), _held(kwargs))
        for one in known.values():
            assert one.shape == one.held.shape, f"{func} changed the shape of its argument: no card tensor can follow"
        if to_host:
            return made
        with _mode_of_views(func, known):
            return _wrapped(made, known)


def torch_device() -> torch.device:
    """Return the card's torch device, by the name of its kind in this process."""
    return torch.device(kind_name(), 0)


def kind_name() -> str:
    """Return torch's name for the kind; renaming it holds for the whole process."""
    name: str = torch._C._get_privateuse1_backend_name()
    return name


@contextmanager
def count_copies() -> Iterator[CopyCounts]:
    """Count the copies within the block, on all threads."""
    global _copies
    before, _copies = _copies, CopyCounts()
    try:
        yield _copies
    finally:
        _copies = before


def used_bytes() -> int:
    """Return the bytes of all card tensors that are alive, shared memory once."""
    storages = [one.held.untyped_storage() for one in gc.get_objects() if type(one) is CardTensor]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


def watch_peak() -> None:
    """Start to count the bytes of newly made tensors of the card; see peak_bytes."""
    global _peak, _before
    storages = [one.held.untyped_storage() for one in gc.get_objects() if type(one) is CardTensor]
    _before = {one.data_ptr(): one for one in storages}  # kept, so that new tensors do not reuse their memory
    _peak = HeldBytes()


def peak_bytes() -> int:
    """Return the peak bytes of the card's tensors since watch_peak was called, and stop counting."""
    global _peak, _before
    seen, _peak, _before = _peak, None, {}
    return used_bytes() if seen is None else used_bytes() - seen.now + seen.peak


def _check(func: Any, tensors: list[torch.Tensor]) -> None:
    if func in _CROSSING:
        return
    host = next((one for one in tensors if not isinstance(one, CardTensor) and one.dim() > 0), None)
    if host is not None:
        raise RuntimeError(f"{func}: a tensor of the host, {list(host.shape)} {host.dtype}, beside one of the card")


def _picks_by_mask(func: Any, args: Any) -> bool:
    if func not in (_ATEN.index.Tensor, _ATEN.index_put_.default, _ATEN.index_put.default):
        return False
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _copy(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
    if isinstance(target, CardTensor):
        if not isinstance(source, CardTensor) and source.dim() > 0:
            _note(_copies.uploads if non_blocking else _copies.waited_uploads)
        target.held.copy_(_held(source))
    elif non_blocking:
        _note(_copies.downloads)
        _under_way.begin(target, _held(source).to(target.dtype, copy=True))
    else:
        _note(_copies.reads)
        target.copy_(_held(source))
    return target


class _UnderWay:
    """Owner of the copies to the host that were started and not waited for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._copies: list[tuple[int, torch.Tensor, torch.Tensor]] = []  # (number, target, final values)
        self.num_begun = 0

    def begin(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Fill the target with garbage until the copy ends."""
        target.fill_(1 if target.dtype is torch.bool else 113)
        with self._lock:
            self.num_begun += 1
            self._copies.append((self.num_begun, target, values))

    def end(self, last: int) -> None:
        """Complete the copies up to number `last`."""
        with self._lock, torch.inference_mode():  # many targets belong to a step, and are waited for outside it
            done = [one for one in self._copies if one[0] <= last]
            self._copies = [one for one in self._copies if one[0] > last]
            with torch.inference_mode():  # the copy may have been started in it
                for _, target, values in done:
                    target.copy_(values)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an op's arguments."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for one in values:
            yield from _tensors(one)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))


def _held(values: Any) -> Any:
    """Return an op's arguments as CPU tensors."""
    if isinstance(values, CardTensor):
        return values.held
    if isinstance(values, (list, tuple)):
        return type(values)(map(_held, values))
    if isinstance(values, dict):
        return {name: _held(value) for name, value in values.items()}
    return torch.device("cpu") if isinstance(values, torch.device) else values


def _on_cpu(func: Any, args: Any, kwargs: Any) -> Any:
    if func is _ATEN.histc.default and not args[0].is_floating_point():  # cards count them and the CPU does not
        return func(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)
    return func(*args, **kwargs)


def _mode_of_views(func: Any, known: dict[int, CardTensor]) -> AbstractContextManager[object]:
    """Let views of a tensor follow its own mode: torch makes inference tensors of new results only."""
    if not known or not any(one.alias_info is not None for one in func._schema.returns):
        return nullcontext()
    is_inference = next(iter(known.values())).is_inference()
    return nullcontext() if is_inference == torch.is_inference_mode_enabled() else torch.inference_mode(is_inference)


def _wrapped(made: Any, known: dict[int, CardTensor]) -> Any:
    """Return an op's results as card tensors, and its own arguments unchanged."""
    if isinstance(made, torch.Tensor):
        was = known.get(id(made))
        return CardTensor(made) if was is None else was
    return [_wrapped(one, known) for one in made] if isinstance(made, (list, tuple)) else made


def _note(counter: Counter[str]) -> None:
    """Count one copy for the innermost running function of the product, or for tests."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and (file := _product_file(frame.f_code.co_filename)) is None:
        frame = frame.f_back
    with _lock:
        counter["tests" if frame is None else f"{file}:{frame.f_code.co_name}"] += 1


@cache
def _product_file(name: str) -> str | None:
    file = Path(name)
    if not file.is_relative_to(_REPOSITORY) or file.relative_to(_REPOSITORY).parts[0] in ("tests", ".venv"):
        return None
    return str(file.relative_to(_REPOSITORY))


class Stream:
    """The only stream: launched work is done on return, but for copies to the host."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device

    def synchronize(self) -> None:
        _under_way.end(_under_way.num_begun)


class Event:
    """An event that is done once recorded. Waiting for one that was never recorded fails: real ones would not wait."""

    def __init__(self, **_: Any) -> None:
        self._last: int | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._last = _under_way.num_begun

    def wait(self, stream: Stream | None = None) -> None:
        assert self._last is not None, "an event is waited for that was never recorded"

    def synchronize(self) -> None:
        assert self._last is not None, "an event is waited for that was never recorded"
        _under_way.end(self._last)

    def query(self) -> bool:
        if self._last is not None:
            _under_way.end(self._last)
        return self._last is not None


def _module() -> types.ModuleType:
    """Return the card's counterpart of torch.cuda."""
    module: Any = types.ModuleType(f"torch.{kind_name()}")
    module.Stream, module.Event = Stream, Event
    module.stream = lambda stream: nullcontext()
    module.synchronize = lambda device=None: Stream().synchronize()
    module.set_device = lambda index: None
    module.current_device = lambda: 0
    module.device_count = lambda: 1
    module.is_available = lambda: True
    module.memory_reserved = lambda device=None: used_bytes()
    module.reset_peak_memory_stats = lambda device=None: watch_peak()
    module.max_memory_reserved = lambda device=None: peak_bytes()
    module.empty_cache = lambda: None
    module._is_in_bad_fork, module.manual_seed_all = (lambda: False), (lambda seed: None)
    module.get_device_name = lambda index: "a card of the tests"
    return module  # type: ignore[no-any-return]


def _factory(op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        return CardTensor(op(*args, **{**kwargs, "device": torch.device("cpu"), "pin_memory": False}))

    return make


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return _copy(target, source, non_blocking=non_blocking)


_peak: HeldBytes | None = None
_before: dict[int, torch.UntypedStorage] = {}
_copies = CopyCounts()
_under_way = _UnderWay()
_lock = threading.Lock()
_guard = _DummyDeviceGuard()
_library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
# Functions that create a tensor from numbers have no tensor argument that could dispatch them.
for _name in ("empty.memory_format", "empty_strided", "arange", "arange.start", "arange.start_step"):
    _base, _, _overload = _name.partition(".")
    _library.impl(_name, _factory(getattr(getattr(_ATEN, _base), _overload or "default")), "PrivateUse1")
_library.impl("_copy_from", _copy_from, "PrivateUse1")
torch._register_device_module(kind_name(), _module())  # type: ignore[no-untyped-call]
torch._C._acc.register_python_privateuseone_device_guard(_guard)
