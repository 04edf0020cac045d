"""torch.npu's graphs on the CPU: the wheel's own Python for them, over a stand-in for the driver below it.

From the wheel come NPUGraph, graph, the dispatch mode that turns attention into tasks, and the handlers that say which
arguments an update reaches. The stand-in records what a capture launches, keeps each task's call, lets an update put
another in its place, and refuses a replay whose tasks wait for events that nobody recorded: on an NPU it never ends.
"""

import ast
import copy
import gc
import logging
import re
import typing
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.devices.capturing_device import Recorder, _Call
from tests.npu import attention_ops
from tests.npu.ops import NpuOps, stand_ins

_FIA = "npu_fused_infer_attention_score"
_PARTS = {
    "torch_npu/npu/_npugraph_handlers/npugraph_handler.py": (
        "NpuGraphOpHandler", "_NPU_GRAPH_OP_HANDLERS", "register_npu_graph_handler",
    ),
    "torch_npu/npu/_npugraph_handlers/ifa_handler.py": (
        "_TensorListOutHandler", "_IFAv1DefaultHandler", "_IFAv2DefaultHandler",
    ),
    "torch_npu/npu/graphs.py": (
        "graph_pool_handle", "graph_task_group_begin", "graph_task_group_end", "graph_task_update_begin",
        "graph_task_update_end", "_GraphDispatchRecord", "_GraphDispatchMode", "NPUGraph", "graph",
    ),
}  # fmt: skip


@dataclass
class Task:
    """One captured call that an update may change. `events` are what it waits for."""

    calls: list[tuple[Any, Any, Any]]
    events: list["ExternalEvent"]

    def run(self) -> None:
        """Compute it; its events have to be recorded again before the next run."""
        for event in self.events:
            if not event.is_recorded:
                raise RuntimeError("a task waits for an event that nobody records: this replay never ends")
            event.is_recorded = False
        for function, args, kwargs in self.calls:
            function(*args, **kwargs)

    def overwrite(self) -> None:
        """Overwrite its outputs with a value that no step computes."""
        for _, _, kwargs in self.calls:
            for tensor in kwargs["out"]:
                tensor.fill_(float("nan"))


@dataclass
class Machine:
    """The driver's side. Owner of all captures; `log` lists the calls it received, in order."""

    tasks: list[Task] = field(default_factory=list)
    events: list["ExternalEvent"] = field(default_factory=list)
    recorders: list[Any] = field(default_factory=list)  # a _TaskRecorder
    log: list[str] = field(default_factory=list)
    pools: dict[object, "weakref.WeakSet[Any]"] = field(default_factory=dict)  # the graphs that use each memory pool

    def use_pool(self, pool: object, graph: object) -> None:
        """Refuse a pool whose graphs are all gone: NPUCachingAllocator.cpp, create_or_incref_pool."""
        if pool in self.pools and not self.pools[pool]:
            raise RuntimeError("INTERNAL ASSERT FAILED: it->second->use_count > 0")
        self.pools.setdefault(pool, weakref.WeakSet()).add(graph)

    def begin_task(self, stream: object) -> None:
        self.recorders.append(_TaskRecorder(runs=True))
        self.recorders[-1].__enter__()

    def end_task(self, stream: object) -> Task:
        recorder = self.recorders.pop()
        recorder.__exit__(None, None, None)
        self.tasks.append(Task(recorder.calls, self.events))
        self.events = []
        return self.tasks[-1]

    def begin_update(self, stream: object, task: Task) -> None:
        self.recorders.append(_TaskRecorder(runs=False))
        self.recorders[-1].__enter__()
        self._updated = task

    def end_update(self, stream: object) -> None:
        recorder = self.recorders.pop()
        recorder.__exit__(None, None, None)
        self._updated.calls = recorder.calls


class _TaskRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records calls; while a task is updated they do not run."""

    def __init__(self, *, runs: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._runs = runs
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {})) if self._runs else None


class _GraphRecorder(Recorder):  # type: ignore[no-untyped-call]
    """Records operations as a card does; an operation that became a task is recorded as the task."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine
        self.tasks: list[Task] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = len(self._machine.tasks)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        for task in self._machine.tasks[before:]:
            self._calls[-1] = _Call(task.run, (), {}, [], [])
            self.tasks.append(task)
        return out

    def overwrite(self) -> None:
        super().overwrite()
        for task in self.tasks:
            task.overwrite()


class ExternalEvent:
    """An event that the host records and a graph waits for."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self.is_recorded = machine, False

    def wait(self, stream: object) -> None:
        self._machine.events.append(self)

    def reset(self, stream: object) -> None:
        pass

    def record(self, stream: object) -> None:
        self.is_recorded = True


class Event:
    """An event of streams: the log notes each wait for it."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def record(self) -> None:
        self._machine.log.append("record")

    def synchronize(self) -> None:
        self._machine.log.append("synchronize")


class Stream:
    """Streams run nothing concurrently here."""

    def wait_stream(self, other: "Stream") -> None:
        assert isinstance(other, Stream)


def make_npu(ops: NpuOps) -> tuple[Any, Machine]:
    """Return the stand-in for torch.npu, and the machine below it."""
    machine = Machine()
    _register_out(ops)

    class BaseGraph:
        """torch_npu._C._NPUGraph."""

        def capture_begin(self, *, pool: object = None, capture_error_mode: str, report_shape: bool) -> None:
            assert capture_error_mode in ("global", "thread_local", "relaxed")
            machine.use_pool(pool, self)
            machine.log.append("capture")
            self.recorder = _GraphRecorder(machine)
            self.recorder.__enter__()  # type: ignore[no-untyped-call]

        def capture_end(self) -> None:
            self.recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self.recorder.overwrite()

        def replay(self) -> None:
            machine.log.append("replay")
            self.recorder.replay()

    @contextmanager
    def stream(chosen: Stream) -> Iterator[None]:
        yield

    npu = SimpleNamespace(
        Stream=lambda **_: Stream(), Event=lambda: Event(machine), ExternalEvent=lambda: ExternalEvent(machine),
        stream=stream, current_stream=Stream, current_device=lambda: 0, synchronize=lambda: None,
        empty_cache=lambda: None, host_empty_cache=lambda: None,
    )  # fmt: skip
    below = SimpleNamespace(_NPUGraph=BaseGraph)
    vars(npu).update(_wheels_parts(ops, npu, below, machine))
    return npu, machine


def _wheels_parts(ops: NpuOps, npu: Any, below: Any, machine: Machine) -> dict[str, Any]:
    """Run the definitions of _PARTS in one namespace together with what they import."""
    torch_npu: Any = stand_ins()["torch_npu"]
    torch_npu.npu, torch_npu._C = npu, below
    namespace: dict[str, Any] = {
        "__name__": "torch_npu_graphs", "torch": _TorchWithNpu(npu), "torch_npu": torch_npu, "re": re, "gc": gc,
        "typing": typing, "Any": Any, "Dict": dict, "Tuple": tuple, "Optional": typing.Optional,
        "dataclass": dataclass, "field": field, "deepcopy": _copy_like_references, "TensorWeakRef": lambda one: one,
        "log": logging.getLogger("torch_npu"), "logger": logging.getLogger("torch_npu"), "force_npugraph_gc": False,
        "pta_error": lambda code: f" [{code}]", "ErrCode": SimpleNamespace(PARAM="PARAM"),
        "_graph_pool_handle": lambda: (0, 1 + len(machine.pools)), "_graph_task_group_begin": machine.begin_task,
        "_graph_task_group_end": machine.end_task, "_graph_task_update_begin": machine.begin_update,
        "_graph_task_update_end": machine.end_update,
    }  # fmt: skip
    for path, names in _PARTS.items():
        tree = ast.parse(ops.wheel.source(path))
        wanted = [node for node in tree.body if _name_of(node) in names]
        assert {_name_of(node) for node in wanted} == set(names), f"{path} lacks some of {names}"
        exec(compile(ast.Module(wanted, []), path, "exec"), namespace)
    return {name: namespace[name] for name in ("NPUGraph", "graph", "graph_pool_handle")}


def _name_of(node: ast.stmt) -> str | None:
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return getattr(node, "name", None)


class _TorchWithNpu:
    """The torch module with an `npu` attribute."""

    def __init__(self, npu: Any) -> None:
        self.npu = npu

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _copy_like_references(value: Any) -> Any:
    """Return a copy that shares its tensors, where the wheel keeps weak references to an NPU's tensors."""
    return value if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _register_out(ops: NpuOps) -> None:
    """Register the variants of attention that write into given tensors, and the shape queries that handlers make."""
    if f"{_FIA}.runs_out" in ops.schemas:
        return
    for name, reference in (
        (_FIA, attention_ops.fused_infer_attention), (f"{_FIA}_v2", attention_ops.fused_infer_attention_v2)
    ):  # fmt: skip
        ops.library.impl(f"{name}.out", _write_into(reference), "CPU")
        ops.library.impl(f"_{name}_get_max_workspace", lambda *_, **__: torch.empty(1, dtype=torch.uint8), "CPU")
        ops.library.impl(f"_{name}_infer_output", _outputs_like, "CPU")
    ops.schemas[f"{_FIA}.runs_out"] = None


def _write_into(reference: Callable[..., Any]) -> Callable[..., None]:
    def run(*args: Any, out: list[torch.Tensor], workspace: torch.Tensor | None = None, **kwargs: Any) -> None:
        for target, made in zip(out, reference(*args, **kwargs), strict=True):
            assert target.shape == made.shape
            target.copy_(made)

    return run


def _outputs_like(query: torch.Tensor, value: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    heads = kwargs.get("num_heads", kwargs.get("num_query_heads", 1))
    if not (kwargs.get("softmax_lse_flag") or kwargs.get("return_softmax_lse")):
        return torch.empty_like(query), torch.zeros(0)
    assert kwargs.get("input_layout", "BSH") == "BSH", "the only layout whose outputs the engine queries"
    return torch.empty_like(query), torch.empty(query.shape[0], heads, query.shape[1], 1)
