"""The ops of torch_npu under their own names on a machine without it: torch.ops.npu.NAME.

schemas of the wheel --define--> meta kernels of the wheel --register--> our CPU references --register--> checked calls

A checked call goes through the dispatcher, which holds it to the schema; runs the wheel's meta kernel on the same
shapes; runs the reference, which refuses what the documents forbid; and compares both results' shapes and dtypes.

All this stays for the life of the process: an op, once defined, cannot be removed. That is harmless, since only NPU
code ever names torch.ops.npu, no module named torch_npu is left behind, and the wheel's changes to torch's own ops
are undone.
"""

import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch.library import Library
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only

from tests.conftest import MISSING
from tests.npu import attention_ops, quantization_ops, small_ops
from tests.npu.rules import Refused, need
from tests.npu.wheel import VERSION, NoWheel, Wheel, find_wheel

_META = "torch_npu/op_plugin/meta/_meta_registrations.py"
_A2 = 220  # one of the wheel's chip numbers below Ascend950's 260
_DTYPE_NUMBERS = {
    "int4": 285, "hifloat8": 290, "float8_e5m2": 291, "float8_e4m3fn": 292, "float8_e8m0fnu": 293,
    "float4_e2m1fn_x2": 296, "float4_e1m2fn_x2": 297,
}  # fmt: skip
REFERENCES: dict[str, Callable[..., Any]] = {
    "npu_fused_infer_attention_score": attention_ops.fused_infer_attention,
    "npu_fused_infer_attention_score_v2": attention_ops.fused_infer_attention_v2,
    "npu_scatter_pa_kv_cache": small_ops.scatter_pa_kv_cache,
    "npu_rms_norm": small_ops.rms_norm,
    "npu_add_rms_norm": small_ops.add_rms_norm,
    "npu_swiglu": small_ops.swiglu,
    "npu_apply_rotary_pos_emb": small_ops.apply_rotary_pos_emb,
    "npu_rotary_mul": small_ops.rotary_mul,
    "npu_dynamic_quant": quantization_ops.dynamic_quant,
    "npu_quantize": quantization_ops.quantize,
    "npu_quant_matmul": quantization_ops.quant_matmul,
    "npu_weight_quant_batchmatmul": quantization_ops.weight_quant_batchmatmul,
    "npu_convert_weight_to_int4pack": quantization_ops.convert_weight_to_int4pack,
    "npu_grouped_matmul": quantization_ops.grouped_matmul,
}


@dataclass(frozen=True, slots=True)
class Call:
    """One checked call."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class NpuOps:
    """The registered ops, and the calls since `calls` was last cleared. Owner of the registrations."""

    wheel: Wheel
    schemas: dict[str, Any]  # by name, overloads as "NAME.OVERLOAD"
    library: Any
    meta_library: Library
    calls: list[Call] = field(default_factory=list)

    def add_reference(self, name: str, reference: Callable[..., Any]) -> None:
        """Let an op run on the CPU by `reference`, which raises Refused for forbidden calls, and check its calls."""
        self.library.impl(name, reference, "CPU")
        setattr(torch.ops.npu, name, CheckedOp(name, getattr(torch.ops.npu, name), self))

    def names(self) -> list[str]:
        """Return the names of the calls, in order."""
        return [call.name for call in self.calls]


def require_npu_ops() -> NpuOps:
    """Return the registered ops; skip the test without the wheel (a failure under `scripts/test --all`)."""
    if importlib.util.find_spec("torch_npu") is not None:
        pytest.skip("torch_npu is installed: its own ops are there")
    try:
        return npu_ops()
    except NoWheel as error:
        pytest.skip(f"{MISSING}: the torch_npu wheel: {error}")


@cache
def npu_ops() -> NpuOps:
    """Register all ops, once per process. Raises NoWheel."""
    wheel = find_wheel()
    library: Any = Library("npu", "DEF")  # type: ignore[no-untyped-call]
    schemas = {}
    for text in map(_as_at_runtime, wheel.schemas()):
        library.define(text)
        schemas[text.partition("(")[0]] = torch._C.parse_schema(f"npu::{text}")
    ops = NpuOps(wheel, schemas, library, _register_meta(wheel))
    library.impl("npu_convert_weight_to_int4pack", quantization_ops.int4pack_shape, "Meta")
    for name, reference in REFERENCES.items():
        ops.add_reference(name, reference)
    return ops


def _as_at_runtime(schema: str) -> str:
    """Return a schema as the compiled library has it: there attention's outputs are one list, as graphs pass them."""
    if not schema.startswith("npu_fused_infer_attention_score") or ".out(" not in schema:
        return schema
    return schema.partition(", Tensor(a!) attention_out")[0] + ", Tensor(a!)[] out) -> ()"


class CheckedOp:
    """Replaces an op of torch.ops.npu, and forwards what it does not check (overloads) to it."""

    def __init__(self, name: str, packet: Any, ops: NpuOps) -> None:
        self._name, self._packet, self._ops = name, packet, ops

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it with the module's checks. Raises Refused, and RuntimeError for arguments outside the schema."""
        self._need_plain_lists(args, kwargs)
        self._ops.calls.append(Call(self._name, args, kwargs))
        if all(tensor.device.type != "cpu" for tensor in _tensors((args, kwargs))):
            return self._packet(*args, **kwargs)
        with _disable_current_modes():  # a graph that is being captured must not record it
            expected = self._packet(*_on_meta(args), **_on_meta(kwargs))
        got = self._packet(*args, **kwargs)
        _compare(self._name, _tensors(got), _tensors(expected))
        return got

    def __getattr__(self, name: str) -> Any:
        return getattr(self._packet, name)

    def _need_plain_lists(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Refuse a tensor where a host list is needed: the dispatcher would silently copy it from the device."""
        given = dict(zip((argument.name for argument in self._ops.schemas[self._name].arguments), args, strict=False))
        for argument in self._ops.schemas[self._name].arguments:
            value = (given | kwargs).get(argument.name)
            if value is not None and "int" in str(argument.type).lower() and "List" in str(argument.type):
                plain = isinstance(value, list) and all(type(one) is int for one in value)
                need(plain, f"{argument.name} is {type(value).__name__}: a list of ints on the host")


def _register_meta(wheel: Wheel) -> Library:
    """Run the wheel's registrations with stand-ins for the parts of torch_npu that they import."""
    namespace: dict[str, Any] = {"__name__": "torch_npu_meta"}
    code = compile(wheel.source(_META), _META, "exec")
    compatible = {"TORCH_NPU_USE_COMPATIBLE_IMPL": "1"}  # leaves torch's own matmul_backward unchanged
    with mock.patch.dict(os.environ, compatible), modules(stand_ins()):
        exec(code, namespace)
    namespace["m_aten"]._destroy()  # and its own _convolution
    library: Library = namespace["m"]
    return library


def stand_ins() -> dict[str, types.ModuleType]:
    """Return modules under torch_npu's names: ops as attributes of torch_npu itself, a chip and a CANN."""

    class ErrCode:
        def __getattr__(self, name: str) -> str:
            return name

    return {
        "torch_npu": _Module("torch_npu", __version__=VERSION, **_DTYPE_NUMBERS),
        "torch_npu.npu": _Module("torch_npu.npu"),
        "torch_npu.npu.utils": _Module("torch_npu.npu.utils", get_cann_version=lambda *_: "9.1.0"),
        "torch_npu.npu._backends": _Module("torch_npu.npu._backends", get_soc_version=lambda: _A2),
        "torch_npu.utils": _Module("torch_npu.utils"),
        "torch_npu.utils._error_code": _Module(
            "torch_npu.utils._error_code",
            ErrCode=ErrCode(),
            ops_error=lambda code: f" [{code}]",
            pta_error=lambda code: f" [{code}]",
        ),
    }


class _Module(types.ModuleType):
    """A module whose missing attributes are the ops, as torch_npu has them."""

    def __init__(self, name: str, **attributes: Any) -> None:
        super().__init__(name)
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.ops.npu, name)


@contextmanager
def modules(named: dict[str, types.ModuleType]) -> Iterator[None]:
    """Make these modules importable within the block."""
    with mock.patch.dict(sys.modules, named):
        yield


def _on_meta(values: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), values)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, torch.Tensor)]


def _compare(name: str, got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    shapes = [[(list(one.shape), one.dtype) for one in side] for side in (got, expected)]
    if shapes[0] != shapes[1]:
        raise Refused(f"{name}: the reference gives {shapes[0]}, the wheel's meta kernel {shapes[1]}")
