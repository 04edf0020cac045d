"""The cost of choosing tokens: `python -P benchmarks/sampling.py choice|step [--threads 2]`.

choice    milliseconds for rows of 49,152 random scores, by torch and by the native kernels in turn (medians)
step      milliseconds of a decoding step of the default model, by its requests' options (medians)
"""

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

from engine.torch_start import prepare_torch

ROUNDS, VOCABULARY, SPREAD, PROMPT, OUTPUTS = 7, 49_152, 3.0, 64, 16
CHOICES: dict[str, dict[str, Any]] = {
    "temperature 1": {},
    "temperature 0.8, top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "top_k 50": {"top_k": 50},
    "top_p 0.9, top_k 50": {"top_p": 0.9, "top_k": 50},
    "min_p 0.1": {"min_p": 0.1},
}
STEPS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {"seed": 3},
    "temperature 0.8, top_p 0.9": {"temperature": 0.8, "top_p": 0.9, "seed": 3},
    "logprobs of 5": {"temperature": 0.0, "logprobs": 5},
    "repetition penalty": {"temperature": 0.0, "repetition_penalty": 1.1},
}


def main() -> None:
    """Print a line for each number of rows and each set of options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("choice", "step"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    args = parser.parse_args()
    prepare_torch(args.threads)
    for line in (choices if args.what == "choice" else steps)(args.threads, args.rows):
        print(line, flush=True)


def choices(threads: int, counts: list[int]) -> Iterator[str]:
    """Yield the times of both choosers."""
    import torch

    from engine.fused.structs import declare
    from engine.sampling.native_chooser import NativeChooser
    from engine.sampling.sampler import Chooser, TorchChooser, sample
    from engine.step import SampleRow
    from native.engine_library import build_engine
    from wire.types import SamplingParams

    torch.set_num_threads(threads)
    library = build_engine()
    functions = declare(library)
    native = NativeChooser(
        functions.best, functions.draw, library.threads(threads),
        lambda scores: (scores.data_ptr(), *scores.shape, scores.stride(0)),
    )  # fmt: skip
    choosers: tuple[Chooser, ...] = (TorchChooser(), native)
    scores = torch.randn(max(counts), VOCABULARY, generator=torch.Generator().manual_seed(0)) * SPREAD
    for name, options in CHOICES.items():
        for count in counts:
            rows = [SampleRow(i, SamplingParams(8, seed=i, **options), 0, 5) for i in range(count)]
            times: list[list[float]] = [[], []]
            for _ in range(ROUNDS):
                for chooser, spent in zip(choosers, times, strict=True):
                    began = time.perf_counter()
                    sample(scores[:count], rows, chooser)
                    spent.append(1000 * (time.perf_counter() - began))
            ours, theirs = statistics.median(times[1]), statistics.median(times[0])
            yield f"{name}, rows {count}: torch {theirs:.2f} ms, native {ours:.2f} ms"


def steps(threads: int, counts: list[int]) -> Iterator[str]:
    """Yield the times of whole steps."""
    from engine.core import EngineCore
    from engine.loader import load_model
    from pdserve.model import ensure_default
    from wire.types import PromptState, SamplingParams

    model = load_model(
        ensure_default(os.environ), dtype="auto", block_size=16, kv_cache_memory=1 << 30, num_threads=threads
    ).model
    for count in counts:
        for name, options in STEPS.items():
            core = EngineCore(model, max_num_seqs=count, max_num_batched_tokens=8192, prefill_chunk_size=512)
            for i in range(count):
                ids = tuple(range(100 + i, 100 + i + PROMPT))
                core.add(PromptState(str(i), str(i), ids, SamplingParams(OUTPUTS, **options)))
            spent = []
            while core.has_work():
                began = time.perf_counter()
                if len(core.step().tokens) == count:
                    spent.append(1000 * (time.perf_counter() - began))
            yield f"{name}, batch {count}: {statistics.median(spent[2:]):.2f} ms a step"


if __name__ == "__main__":
    main()
