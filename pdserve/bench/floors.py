"""This machine's memory and arithmetic limits, measured with plain torch in the same run."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from devices.interface import Device
from engine.checkpoints.model_identity import stored_tensors
from pdserve.bench.cases import PREFILL_PROMPT, BenchCase

_READ_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Floors:
    """The machine's GFLOP/s of matrix products and GB/s of plain reads, and the operations and bytes of the model."""

    gflops: float
    read_gbs: float
    weight_bytes: int
    weight_flops: int  # per token, all linear layers except the logits'
    logit_flops: int
    kv_token_bytes: int

    def better(self, other: "Floors") -> "Floors":
        """Return the better of two measurements of one machine: other programs may have disturbed either."""
        return replace(self, gflops=max(self.gflops, other.gflops), read_gbs=max(self.read_gbs, other.read_gbs))

    def case_s(self, case: BenchCase) -> float:
        """Return the minimum seconds of a case."""
        run = case.run
        steps = run.out - (0 if case.before is None else case.before.out)
        prefill = run.requests * (run.prompt * self.weight_flops + self.logit_flops) / self.gflops / 1e9
        if run.out == 1:
            return prefill
        decode = steps * self._step_s(run.requests, run.prompt + run.out // 2)
        return decode if case.before is not None else decode + prefill

    def _step_s(self, batch: int, context: int) -> float:
        """Return the longer of two times: to read weights and KV once, and to multiply."""
        read = self.weight_bytes + batch * context * self.kv_token_bytes
        return max(read / self.read_gbs, batch * (self.weight_flops + self.logit_flops) / self.gflops) / 1e9


def measure_floors(path: Path, info: Any, say: Callable[..., None], device: Device) -> Floors:
    """Measure `device` with the shapes of the model's linear layers, and print the rates.

    For bfloat16, the faster of float32 and bfloat16 counts: products may be computed in either.
    """
    import torch

    sizes = [tensor.shape for tensor in stored_tensors(path) if len(tensor.shape) == 2]
    inner = [size for size in sizes if size[0] != info.vocab_size]
    gflops = {name: _matmul_gflops(inner, getattr(torch, name), device) for name in ("float32", "bfloat16")}
    read = _read_gbs(device)
    say(measure="floor", **{f"matmul_gflops_{name}": rate for name, rate in gflops.items()}, read_gbs=read)
    num_inner = sum(rows * columns for rows, columns in inner)
    num_logit = info.vocab_size * next(size[1] for size in sizes if size[0] == info.vocab_size)
    return Floors(
        gflops=max(gflops.values()) if info.dtype == "bfloat16" else gflops["float32"],
        read_gbs=read,
        weight_bytes=(num_inner + num_logit) * getattr(torch, info.dtype).itemsize,
        weight_flops=2 * num_inner,
        logit_flops=2 * num_logit,
        kv_token_bytes=info.layout.token_bytes,
    )


def _matmul_gflops(sizes: Sequence[tuple[int, ...]], dtype: Any, device: Device) -> float:
    """Return GFLOP/s of 512 rows through one layer's worth of each distinct weight shape."""
    import torch

    place = device.torch_device
    layers = [torch.randn(size, dtype=dtype, device=place) for size in sorted(set(sizes))]
    inputs = [torch.randn(PREFILL_PROMPT, weight.shape[1], dtype=dtype, device=place) for weight in layers]

    def once() -> None:
        for rows, weight in zip(inputs, layers, strict=True):
            torch.nn.functional.linear(rows, weight)

    return 2 * PREFILL_PROMPT * sum(weight.numel() for weight in layers) / _best_s(once, 20, device) / 1e9


def _read_gbs(device: Device) -> float:
    """Return GB/s of summing memory larger than any cache."""
    import torch

    memory = torch.ones(_READ_BYTES // 4, device=device.torch_device)
    return _READ_BYTES / _best_s(lambda: memory.sum(), 5, device) / 1e9


def _best_s(call: Callable[[], object], times: int, device: Device) -> float:
    """Return the shortest time of `times` calls, in seconds, after one to warm up: a floor is the machine's best."""
    call()
    device.synchronize()
    shortest = float("inf")
    for _ in range(times):
        began = time.perf_counter()
        call()
        device.synchronize()
        shortest = min(shortest, time.perf_counter() - began)
    return shortest
