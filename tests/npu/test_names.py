"""Every name of torch_npu that the product uses is in the wheel: ops, torch.npu's functions, arguments of graphs."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from devices.collectives import HCCL_DEFAULTS
from engine.attention.npu import _LENGTHS
from tests.npu.ops import NpuOps
from tests.npu.wheel import GROUPS, Wheel

_ROOT = Path(__file__).parents[2]
_OURS = (
    "devices/npu.py",
    "devices/npu_graph.py",
    "devices/torch_device.py",
    "engine/attention/npu.py",
    "engine/attention/npu_fused.py",
)
_GRAPHS = "torch_npu/npu/graphs.py"
_FIA = "npu_fused_infer_attention_score"


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Yield our files that use torch_npu."""
    for path in [
        *(_ROOT / one for one in _OURS),
        *(_ROOT / "engine/npu").glob("*.py"),
        _ROOT / "engine/attention/npu.py",
    ]:
        yield path.name, ast.parse(path.read_text(encoding="utf-8"))


def attributes_of(tree: ast.AST, owners: tuple[str, ...]) -> set[str]:
    """Return X of every OWNER.X, such as "self._module.Event"."""
    return {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) in owners
    }


def exported(wheel: Wheel, path: str) -> set[str]:
    """Return the names that a Python source of the wheel defines or imports at module level."""
    found: set[str] = set()
    for node in ast.parse(wheel.source(path)).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
    return found


def test_every_name_of_torch_npu_that_we_use_is_in_the_wheel(wheel: Wheel) -> None:
    there = exported(wheel, "torch_npu/npu/__init__.py") | exported(wheel, "torch_npu/npu/memory.py")
    there |= exported(wheel, "torch_npu/npu/utils.py") | exported(wheel, "torch_npu/npu/graphs.py")
    owners = ("npu", "self._npu", "torch.npu", "torch_npu.npu")
    used = {name: attributes_of(tree, owners) for name, tree in sources()}
    used["torch_device.py"] = attributes_of(dict(sources())["torch_device.py"], ("self._module",))

    assert {"NPUGraph", "graph", "Stream", "Event", "graph_pool_handle"} <= used["npu_graph.py"]
    assert {"mem_get_info", "set_device", "synchronize"} <= used["torch_device.py"]
    missing = {name: sorted(names - there) for name, names in used.items() if names - there}
    assert missing == {}


def test_torch_npu_reads_every_variable_by_our_name(wheel: Wheel) -> None:
    """It reads the error handling by TORCH_HCCL_... first and by the former HCCL_..., which the header has."""
    text = wheel.source(GROUPS)
    names = [name for name in HCCL_DEFAULTS if name.startswith("TORCH_")]

    assert len(names) == 3
    assert [name for name in names if f'"{name.removeprefix("TORCH_")}"' not in text and f'"{name}"' not in text] == []
    assert "NoHandling = 0" in text


def test_storages_have_the_calls_that_share_memory(wheel: Wheel) -> None:
    text = wheel.source("torch_npu/utils/storage.py")
    calls = attributes_of(
        ast.parse((_ROOT / "devices/npu_memory.py").read_text(encoding="utf-8")), ("storage", "_STORAGE")
    )

    assert {"_share_npu_", "_new_shared_npu", "_release_ipc_counter_npu"} == calls
    assert [name for name in calls if f'setattr(torch.UntypedStorage, "{name}"' not in text] == []


def test_every_op_that_we_use_has_a_schema_and_a_meta_kernel(npu_ops: NpuOps) -> None:
    used = {name for _, tree in sources() for name in attributes_of(tree, ("torch.ops.npu",))}

    assert {"npu_fused_infer_attention_score", "npu_scatter_pa_kv_cache", "npu_rms_norm"} <= used
    for name in used:
        assert name in npu_ops.schemas
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"npu::{name}", "Meta")


def parameters(wheel: Wheel, path: str, *places: str) -> list[str]:
    """Return the parameters of a function, or of a method as (class, name)."""
    body: Any = ast.parse(wheel.source(path)).body
    for place in places:
        (node,) = [one for one in body if getattr(one, "name", None) == place]
        body = node.body
    return [argument.arg for argument in node.args.args + node.args.kwonlyargs]


def test_graphs_are_captured_and_updated_with_known_arguments(wheel: Wheel) -> None:
    capture, update = parameters(wheel, _GRAPHS, "graph", "__init__"), parameters(wheel, _GRAPHS, "NPUGraph", "update")

    tree = ast.parse((_ROOT / "devices/npu_graph.py").read_text(encoding="utf-8"))
    calls = {ast.unparse(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    given = {name: {word.arg for word in calls[name].keywords} for name in ("npu.graph", "self._graph.update")}
    assert given == {
        "npu.graph": {"pool", "stream", "auto_dispatch_capture", "capture_error_mode"},
        "self._graph.update": {"cpu_update_input"},
    }
    assert given["npu.graph"] <= set(capture)
    assert given["self._graph.update"] <= set(update)
    assert "wait_stream" in wheel.source("torch_npu/npu/streams.py")


def test_the_lists_that_a_graph_updates_are_arguments_of_the_ops(npu_ops: NpuOps) -> None:
    handlers = npu_ops.wheel.source("torch_npu/npu/_npugraph_handlers/ifa_handler.py")
    for op, name in zip(
        ("npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"), _LENGTHS, strict=True
    ):
        assert name in {argument.name for argument in npu_ops.schemas[op].arguments}
        assert f'"{name}"' in handlers
