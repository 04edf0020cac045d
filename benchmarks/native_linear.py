"""Products with packed weights on one thread: GFLOP/s of many rows, GB/s of few, against another build and plain reads.

    python -P benchmarks/native_linear.py [--kernel avx2] [--dtype bfloat16] [--beside OTHER.so] [--k 1536]

Builds and reads take turns, each with its own weights, so that products of few rows read them from memory, not from a
cache. Figures use the shortest time of each piece: pieces are short, so other load on the machine delays only some of
them. Prefill is also compared with float32 on one thread with the same instructions.
"""

import argparse
import ctypes
import mmap
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from engine.fused.structs import FinishCode, Linear, address, declare
from engine.fused.weights import PackedMemory, packed_bytes
from native.engine_library import EngineLibrary, build_engine

_KERNELS = ("plain", "avx2", "avx512")  # kernels that take rows in float32, by number
_COLUMNS, _PIECES = 1024, 24


class Build:
    """One library's products over its own pieces of weights."""

    def __init__(self, library: EngineLibrary, kernel: str, dtype: torch.dtype, k: int) -> None:
        native, pointer, size = library.functions, ctypes.c_void_p, ctypes.c_size_t
        native.linear_kernel_number.argtypes, native.linear_kernel_number.restype = (ctypes.c_uint,), pointer
        native.linear_run.argtypes = (
            pointer, pointer, pointer, size, size, pointer, size, ctypes.c_int, ctypes.c_uint, ctypes.c_uint,
        )  # fmt: skip
        native.linear_run.restype = None
        self._run, self._kernel = native.linear_run, native.linear_kernel_number(_KERNELS.index(kernel))
        if self._kernel is None:
            sys.exit(f"--kernel {kernel}: this CPU does not have these instructions")
        weight = torch.nn.Linear(k, _COLUMNS, bias=False, dtype=dtype).requires_grad_(False)
        threads = library.threads(1)
        self._memory = PackedMemory(_PIECES * packed_bytes([weight]), declare(library), threads)
        self._pieces: list[Linear] = [self._memory.pack([weight], FinishCode.STORE) for _ in range(_PIECES)]

    def multiply(self, piece: int, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Compute one piece's columns of `out`."""
        self._run(
            address(self._pieces[piece]), self._kernel, rows.data_ptr(), rows.stride(0), len(rows), out.data_ptr(),
            out.stride(0), 0, 0, 1,
        )  # fmt: skip


def shortest(works: Sequence[Callable[[int], object]], rounds: int) -> list[float]:
    """Return the seconds of each function: the sum of the shortest times of its pieces. The functions take turns."""
    best = [[float("inf")] * _PIECES for _ in works]
    for _ in range(rounds):
        for piece in range(_PIECES):
            for number, work in enumerate(works):
                began = time.perf_counter()
                work(piece)
                best[number][piece] = min(best[number][piece], time.perf_counter() - began)
    return [sum(times) for times in best]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--kernel", choices=_KERNELS, default="avx2")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--beside", type=Path, help="an engine library of another revision")
    parser.add_argument("--k", type=int, default=1536)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dtype, library = getattr(torch, args.dtype), build_engine()
    builds = [Build(library, args.kernel, dtype, args.k)]
    if args.beside:
        builds.append(Build(EngineLibrary(args.beside), args.kernel, dtype, args.k))
    plain = _plain_memory(_COLUMNS * args.k * dtype.itemsize)
    for count in (1, 2, 4):
        work = [_multiply_random(build, count, args.k, dtype) for build in builds]
        *times, read_s = shortest([*work, lambda piece: plain[piece].sum()], args.rounds)
        print(f"rows {count}: plain read {plain.nbytes / read_s / 1e9:.1f} GB/s;", _rates(plain.nbytes, times, read_s))
    count, wide = 96, Build(library, args.kernel, torch.float32, args.k)
    *times, wide_s = shortest([_multiply_random(build, count, args.k, dtype) for build in (*builds, wide)], args.rounds)
    flops = 2 * count * args.k * _COLUMNS * _PIECES
    print(f"rows {count}: in float32 {flops / wide_s / 1e9:.1f} GFLOP/s;", _rates(flops, times, wide_s))


def _multiply_random(build: Build, count: int, k: int, dtype: torch.dtype) -> Callable[[int], object]:
    rows, out = torch.randn(count, k).to(dtype).float(), torch.empty(count, _COLUMNS)
    return lambda piece: build.multiply(piece, rows, out)


def _plain_memory(piece_bytes: int) -> torch.Tensor:
    """Return memory of shape [pieces, float32 values of a piece], in huge pages like packed weights."""
    memory = mmap.mmap(-1, _PIECES * piece_bytes)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).view(_PIECES, -1).fill_(1)


def _rates(amount: float, times: Sequence[float], least_s: float) -> str:
    return ", ".join(f"{amount / one_s / 1e9:.1f} ({least_s / one_s:.2f} of that)" for one_s in times)


if __name__ == "__main__":
    main()
