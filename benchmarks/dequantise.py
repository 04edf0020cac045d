"""The speed of dequantisation: one matrix in each layout, from memory, in CPU time.

    python benchmarks/dequantise.py [--size 4096] [--dtype bfloat16] [--repeats 5]

It runs one thread, so a figure is for one core, and prints the best repeat, because other load only adds time.
"""

import argparse
import time
from collections.abc import Mapping, Sequence

import torch

from engine.checkpoints.weights import TensorSlice
from engine.quantization.awq import AwqLayout
from engine.quantization.compressed import CompressedLayout
from engine.quantization.fp8 import Fp8Layout
from engine.quantization.gptq import GptqLayout
from engine.quantization.interface import Layout
from engine.quantization.weights import DequantisingWeights

GROUP = 128
Tensors = Mapping[str, torch.Tensor]


class MemoryWeights:
    """Tensors in memory; reading copies them."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = {f"layer.{name}": tensor for name, tensor in tensors.items()}

    @property
    def names(self) -> Sequence[str]:
        """The names of all tensors, sorted."""
        return sorted(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's whole shape."""
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's dtype."""
        return self._tensors[name].dtype

    def read(self, name: str, part: TensorSlice | None = None) -> torch.Tensor:
        """Return a copy of a tensor or of a part of it."""
        whole = self._tensors[name]
        return (whole if part is None else whole.narrow(part.dim, part.start, part.end - part.start)).clone()


def cases(size: int) -> dict[str, tuple[Layout, Tensors]]:
    """Return one matrix [size, size] of random codes in each layout, in groups of 128."""

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)

    scales = torch.rand(size // GROUP, size).half()
    inputs = torch.arange(size, dtype=torch.int32) // GROUP
    gptq = {"qweight": words(size // 8, size), "qzeros": words(size // GROUP, size // 8), "scales": scales}
    awq = {"qweight": words(size, size // 8), "qzeros": words(size // GROUP, size // 8), "scales": scales}
    int8 = torch.randint(-128, 127, (size, size), dtype=torch.int8)
    blocks = torch.rand(size // GROUP, size // GROUP)
    return {
        "AWQ": (AwqLayout(GROUP), awq),
        "GPTQ": (GptqLayout(4, GROUP, 1), gptq | {"g_idx": inputs}),
        "GPTQ, act order": (GptqLayout(4, GROUP, 1), gptq | {"g_idx": inputs[torch.randperm(size)]}),
        "int8": (CompressedLayout("int8", True), {"weight": int8, "weight_scale": torch.rand(size, 1).bfloat16()}),
        "fp8": (Fp8Layout((GROUP, GROUP)), {"weight": int8.to(torch.float8_e4m3fn), "weight_scale_inv": blocks}),
    }


def best_s(weights: DequantisingWeights, repeats: int) -> float:
    """Return the least CPU time of one read, in seconds."""
    times = []
    for _ in range(repeats + 1):
        began = time.process_time()
        weights.read("layer.weight")
        times.append(time.process_time() - began)
    return min(times[1:])


def main() -> None:
    """Print millions of weights per second for each layout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, (layout, tensors) in cases(options.size).items():
        weights = DequantisingWeights(MemoryWeights(tensors), layout, getattr(torch, options.dtype))
        rate = options.size**2 / best_s(weights, options.repeats) / 1e6
        print(f"{name:16} {rate:6.0f} million weights per second")


if __name__ == "__main__":
    main()
