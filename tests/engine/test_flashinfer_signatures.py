"""Our calls of flashinfer, compared with the signatures in its wheel: the stand-ins', and every call of the engine."""

import inspect
import os
from collections.abc import Callable, Iterator
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig

from engine.attention import flashinfer_paged
from engine.attention.flashinfer_paged import FlashInferAttention, PlanKey
from engine.attention.interface import AttentionOptions
from engine.attention.registered import NAME, register
from engine.cuda import nucleus
from engine.cuda.flashinfer_ops import FlashInferOps
from engine.cuda.torch_ops import TorchOps
from engine.modules.interface import GELU, GELU_TANH, SILU, NormWeight
from engine.modules.replace import replace_modules
from tests.conftest import MISSING
from tests.data_wheel import NoWheel
from tests.devices.fake_device import FakeDevice
from tests.engine import flashinfer_ops_stand_in, flashinfer_stand_in
from tests.engine.attention_case import Shape, make_case
from tests.engine.flashinfer_wheel import VERSION, Wheel, differences, find_wheel, wheel_in
from tests.engine.test_attention_cuda import Fixed, agree

_METHODS = ("__init__", "plan", "run")
_WRAPPERS = ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper")
_SHAPE = Shape(num_heads=8, num_kv_heads=2, key_dim=64, value_dim=64, dtype=torch.bfloat16, pool_dtype=torch.bfloat16)
_STEPS = {"decode": [(3, 1), (70, 1)], "mixed": [(9, 1), (0, 18)]}
_SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


class RecordedNames:
    """Stands in for the module: records the requested names, and has all of them."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __getattr__(self, name: str) -> object:
        self.names.append(name)
        return object()


def used_functions() -> list[str]:
    """Return the names of all functions that the engine may call."""
    module = RecordedNames()
    ops = FlashInferOps(module, "flashinfer")
    for adds_one in (False, True):
        weight = NormWeight(torch.ones(4, dtype=torch.bfloat16), 1e-6, adds_one)
        assert ops.norm(weight) is not None
        assert ops.add_norm(weight) is not None
    for activation in (SILU, GELU, GELU_TANH):
        assert ops.gate(activation, torch.bfloat16) is not None
    assert ops.rotate(64, torch.bfloat16) is not None
    return [*module.names, nucleus._OP]


@pytest.fixture(autouse=True)
def a_small_workspace(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As the stand-in requires at least."""
    monkeypatch.setattr(flashinfer_paged, "WORKSPACE_BYTES", flashinfer_stand_in.MIN_WORKSPACE)
    yield
    flashinfer_stand_in._Wrapper.made.clear()


@pytest.fixture(scope="module")
def wheel() -> Wheel:
    """The unzipped wheel; where it is not available the test is skipped (a failure under `scripts/test --all`)."""
    try:
        return find_wheel()
    except NoWheel as error:
        pytest.skip(f"{MISSING}: the flashinfer wheel: {error}")


class HeldModule:
    """The stand-ins, whose every call is bound to the wheel's signature first. `changed` changes signatures."""

    def __init__(self, wheel: Wheel, changed: Callable[[str, Signature], Signature] = lambda _, real: real) -> None:
        self._wheel, self._changed = wheel, changed

    def __getattr__(self, name: str) -> Any:
        if name in _WRAPPERS:
            own, methods = getattr(flashinfer_stand_in, name), self._wheel.methods(name)
            held = {one: _checked_call(getattr(own, one), self._changed(one, methods[one]), skip=1) for one in _METHODS}
            return type(name, (own,), held)
        return _checked_call(
            getattr(flashinfer_ops_stand_in, name), self._changed(name, self._wheel.signature(name)), skip=0
        )


def _checked_call(function: Callable[..., Any], real: Signature, *, skip: int) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        real.bind(*args[skip:], **kwargs)
        return function(*args, **kwargs)

    return call


def attend(module: Any) -> None:
    """Run steps of each kind through the wrappers of a module."""
    options = AttentionOptions(0.1, 20, 2.0, torch.zeros(8))
    for parts in _STEPS.values():
        case = make_case(parts, _SHAPE)
        agree(case.run(FlashInferAttention(module, FakeDevice()), options), case, options)
    case = make_case(_STEPS["decode"], _SHAPE)
    agree(Fixed(FlashInferAttention(module, FakeDevice()), case).run(case, options), case, options)


def replaced(module: Any, config: Any) -> str:
    """Return how a module replaced a network's parts."""
    register()
    torch.manual_seed(1)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=NAME).eval()
    (line,) = replace_modules(made, (FlashInferOps(module, "flashinfer"), TorchOps()))
    return line


@pytest.mark.parametrize("name", used_functions())
def test_stand_in_functions_have_the_real_signatures(name: str, wheel: Wheel) -> None:
    assert differences(getattr(flashinfer_ops_stand_in, name), wheel.signature(name)) == []


@pytest.mark.parametrize("method", _METHODS)
@pytest.mark.parametrize("name", _WRAPPERS)
def test_stand_in_methods_have_the_real_signatures(name: str, method: str, wheel: Wheel) -> None:
    own = getattr(getattr(flashinfer_stand_in, name), method)

    assert differences(own, wheel.methods(name)[method], is_method=True) == []


def test_every_call_of_attention_fits_the_real_signatures(wheel: Wheel) -> None:
    attend(HeldModule(wheel))


@pytest.mark.parametrize("config", [LlamaConfig(**_SIZES), Gemma2Config(**_SIZES)], ids=["llama", "gemma2"])
def test_every_call_of_modules_fits_the_real_signatures(config: Any, wheel: Wheel) -> None:
    norms = 3 if isinstance(config, LlamaConfig) else 5

    line = replaced(HeldModule(wheel), config)

    assert line == f"by flashinfer: {norms} norms, 1 gated MLPs, 1 attentions, 1 layers"


def renamed(old: str) -> Callable[[str, Signature], Signature]:
    """Return what gives a parameter of all functions another name."""

    def change(_: str, real: Signature) -> Signature:
        return real.replace(
            parameters=[one.replace(name="other") if one.name == old else one for one in real.parameters.values()]
        )

    return change


def one_more(function: str) -> Callable[[str, Signature], Signature]:
    """Return what lets a function need one more argument."""

    def change(name: str, real: Signature) -> Signature:
        more = [Parameter("more", Parameter.KEYWORD_ONLY)] if name == function else []
        kept = [one for one in real.parameters.values() if one.kind is not Parameter.VAR_KEYWORD]
        return real.replace(parameters=[*kept, *more])

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (renamed("sm_scale"), "unexpected keyword argument 'sm_scale'"),
        (renamed("logits_soft_cap"), "unexpected keyword argument 'logits_soft_cap'"),
        (renamed("paged_kv_indices_buffer"), "unexpected keyword argument 'paged_kv_indices_buffer'"),
        (renamed("causal"), "unexpected keyword argument 'causal'"),
        (one_more("plan"), "missing a required(?: keyword-only)? argument: 'more'"),
        (one_more("run"), "missing a required(?: keyword-only)? argument: 'more'"),
    ],
)
def test_a_call_of_attention_that_does_not_fit_is_found(
    change: Callable[[str, Signature], Signature], message: str, wheel: Wheel
) -> None:
    with pytest.raises(TypeError, match=message):
        attend(HeldModule(wheel, change))


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        (renamed("eps"), "norms"),
        (renamed("is_neox"), "attentions"),
        (one_more("silu_and_mul"), "gated MLPs"),
        (one_more("fused_add_rmsnorm"), "layers"),
    ],
)
def test_a_call_of_a_module_that_does_not_fit_is_found(
    change: Callable[[str, Signature], Signature], lost: str, wheel: Wheel
) -> None:
    by_flashinfer, _, by_torch = replaced(HeldModule(wheel, change), LlamaConfig(**_SIZES)).partition("; by torch: ")

    assert lost not in by_flashinfer
    assert lost in by_torch


def _real(first: int, second: float = 1.0, *rest: int, third: bool = False, **more: int) -> None: ...


def _fits(first: int, second: float = 1.0, *, third: bool = False) -> None: ...


def _other_name(first: int, other: float = 1.0) -> None: ...


def _other_order(second: float, first: int) -> None: ...


def _other_default(first: int, second: float = 2.0) -> None: ...


def _too_few(second: float = 1.0) -> None: ...


def _by_place(first: int, second: float = 1.0, third: bool = False) -> None: ...


@pytest.mark.parametrize(
    ("stand_in", "messages"),
    [
        (_fits, []),
        (_other_name, ["other is not taken"]),
        (_other_order, [
            "second is not at place 0", "second: one may be left out, the other not", "first is not at place 1",
        ]),
        (_other_default, ["second is 2.0 by default, not 1.0"]),
        (_too_few, ["second is not at place 0", "first has to be given"]),
        (_by_place, ["third is not at place 2"]),
    ],
)  # fmt: skip
def test_extra_parameters_of_a_stand_in_are_named(stand_in: Callable[..., Any], messages: list[str]) -> None:
    assert differences(stand_in, inspect.signature(_real)) == messages


def test_a_name_that_the_wheel_lacks_is_named(wheel: Wheel) -> None:
    with pytest.raises(LookupError, match=f"flashinfer {VERSION} has no rms_norm"):
        wheel.signature("rms_norm")


def test_without_an_index_the_reason_is_given_and_nothing_left(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}

    with pytest.raises(NoWheel, match=f"pip download flashinfer-python=={VERSION} failed: "):
        wheel_in(tmp_path, environ | {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull})

    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_the_head_sizes_and_dtypes_we_use_are_supported(wheel: Wheel) -> None:
    kind = PlanKey(8, 2, 64, torch.bfloat16, 16, AttentionOptions(0.1, 20, 2.0))

    for name in _WRAPPERS:
        assert set(kind.keywords()) <= set(wheel.methods(name)["plan"].parameters)
