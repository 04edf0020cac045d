"""Compare linear layers and experts in each quantised format of the device's traits with their dequantised weights."""

import functools
from collections.abc import Iterator

import torch

from devices.interface import Device
from engine.quantization.interface import EvenGroups, Grouped, StaticInputs
from pdserve.selftest.check import NotHere, SelftestCheck, Wrong

_OUTPUTS, _INPUTS, _GROUP = 256, 512, 128
_EXPERTS = 4


def linear_checks(device: Device) -> Iterator[SelftestCheck]:
    """Yield a check for each format, or one that reports that there are none."""
    if not device.traits.kept_linears:
        yield SelftestCheck("linear layers", "quantised", functools.partial(_no_formats, device))
    for name in device.traits.kept_linears:
        yield SelftestCheck("linear layers", name, functools.partial(_compare, device, name))


def _no_formats(device: Device) -> str:
    raise NotHere(f"weights are dequantised at load on {device.traits.kind}")


def _compare(device: Device, name: str) -> str:
    from engine.quantization.kept import KeptLinear, kept_weight
    from engine.quantization.kept_check import disagreement
    from engine.quantization.kept_table import EXPERTS, FORMATS

    if name in EXPERTS:
        return _compare_experts(device, name)
    form, tried, reasons = FORMATS[name], list[str](), list[str]()
    for sort, grouped, rounded_inputs in _weights(device.torch_device):
        weight = kept_weight(grouped, rounded_inputs=rounded_inputs)
        if isinstance(weight, str) or not form.handles(weight):
            continue
        lacking = form.lacking(weight, torch.bfloat16)
        if lacking is not None:
            reasons.append(lacking)
            continue
        linear = torch.nn.Linear(_INPUTS, _OUTPUTS, bias=False, device="meta", dtype=torch.bfloat16)
        with torch.inference_mode():
            kept = KeptLinear(linear, form.pack(weight, torch.bfloat16), weight.order)
            why = disagreement(kept, grouped, weight, form, torch.bfloat16)
        if why is not None:
            raise Wrong(f"{sort}: {why}")
        tried.append(sort)
    return _result(tried, reasons)


def _compare_experts(device: Device, name: str) -> str:
    from engine.quantization.compact import compact_experts
    from engine.quantization.kept import kept_weight
    from engine.quantization.kept_experts_load import choose_format
    from engine.quantization.kept_table import EXPERTS

    form, tried, reasons = EXPERTS[name], list[str](), list[str]()
    host = torch.device("cpu")  # not every device holds every type of codes
    for sort, grouped, rounded_inputs in _weights(host):
        weight = kept_weight(grouped, rounded_inputs=rounded_inputs)
        assert not isinstance(weight, str)
        weights = compact_experts([weight] * _EXPERTS, _EXPERTS, host)
        if isinstance(weights, str) or not form.handles(weights, rounded_inputs):
            continue
        weights = weights.to(device.torch_device)
        lacking = form.lacking(weights, torch.bfloat16)
        if lacking is not None:
            reasons.append(lacking)
            continue
        with torch.inference_mode():
            made = choose_format(weights, {0: weight, _EXPERTS - 1: weight}, [form], rounded_inputs, torch.bfloat16)
        if isinstance(made, str):
            raise Wrong(f"{sort}: {made}")
        tried.append(sort)
    return _result(tried, reasons)


def _result(tried: list[str], reasons: list[str]) -> str:
    if not tried:
        raise NotHere("; ".join(reasons) or "this format supports none of the weights tested here")
    return ", ".join(tried)


def _weights(device: torch.device) -> Iterator[tuple[str, Grouped, torch.dtype | None]]:
    """Yield random weights as in AWQ and GPTQ (4 bits in groups, with zero points), in W8A8 and in fp8.

    W8A8 is yielded with inputs rounded by token, then with inputs rounded by a stored step; fp8 with one scale per
    row, then with one per block. Weights come with a name, and with the type to which inputs are rounded, if any.
    """
    numbers = torch.Generator().manual_seed(1)

    def codes(low: int, high: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(low, high, (_OUTPUTS, _INPUTS), generator=numbers).to(dtype).to(device)

    def scales(groups: int) -> torch.Tensor:
        return (0.01 + 0.01 * torch.rand(_OUTPUTS, groups, generator=numbers)).to(device)

    groups = _INPUTS // _GROUP
    zeros = torch.randint(0, 16, (_OUTPUTS, groups), generator=numbers).to(torch.uint8).to(device)
    yield "4-bit in groups", Grouped(codes(0, 16, torch.uint8), scales(groups), zeros, EvenGroups(_GROUP)), None
    yield "W8A8", Grouped(codes(-127, 128, torch.int8), scales(1), None, EvenGroups(_INPUTS)), torch.int8
    yield "static W8A8", _static(codes(-127, 128, torch.int8), scales(1)), torch.int8
    float8 = torch.float8_e4m3fn
    yield "fp8", Grouped(codes(-127, 128, float8), scales(1), None, EvenGroups(_INPUTS)), float8
    blocks = scales(groups)[::_GROUP].repeat_interleave(_GROUP, 0)
    yield "fp8 by block", Grouped(codes(-127, 128, float8), blocks, None, EvenGroups(_GROUP)), float8


def _static(codes: torch.Tensor, scales: torch.Tensor) -> Grouped:
    step, zero = 0.03, -7
    bias = 50 - zero * codes.sum(1, dtype=torch.int32)
    return Grouped(
        codes, scales, None, EvenGroups(_INPUTS), StaticInputs(step, zero, scales.flatten() * step, bias)
    )  # fmt: skip
