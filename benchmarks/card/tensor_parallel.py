"""One instance on one device and on two: the tokens per second of streams that decode together."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter

from benchmarks import hop
from benchmarks.card.model_folder import write_model
from benchmarks.card.rows import Row
from benchmarks.card.shapes import Shape
from benchmarks.kv.control import ROOT
from devices.interface import Device

GOAL = 1.6
_STREAMS, _PROMPT_TOKENS = 32, 16
_TOKENS, _POOL = {True: 16, False: 128}, {True: "64MiB", False: "8GiB"}


def measure_tensor_parallel(shape: Shape, device: Device, *, tiny: bool) -> Iterator[Row]:
    """Yield a row for one rank and one for two. Raises SystemExit, with a message, if the server does not start."""
    rates: list[float] = []
    with tempfile.TemporaryDirectory(prefix="card-tp-") as folder:
        write_model(shape, device, Path(folder))
        for ranks in (1, 2):
            seconds = _serve(Path(folder), shape, device, ranks, tiny=tiny)
            rates.append(_STREAMS * _TOKENS[tiny] / seconds)
            yield Row(
                f"{shape.name} {_STREAMS} streams, TP {ranks}", "pdserve", rates[-1], "tokens/s",
                rates[0] if ranks > 1 else None, "TP 1", None if tiny or ranks == 1 else GOAL,
            )  # fmt: skip


def _serve(folder: Path, shape: Shape, device: Device, ranks: int, *, tiny: bool) -> float:
    """Return the seconds that all streams take on a server of `ranks` ranks."""
    (port,) = hop.free_ports(1)
    command = [
        sys.executable, "-P", "-m", "pdserve", "serve", str(folder), "--port", str(port), "--device",
        device.traits.kind, "--dtype", shape.dtype, "--tensor-parallel-size", str(ranks), "--kv-cache-memory",
        _POOL[tiny], "--max-num-seqs", str(_STREAMS), "--served-model-name", "model",
    ]  # fmt: skip
    with ExitStack() as stack:
        process = subprocess.Popen(command, cwd=ROOT, env=dict(os.environ), stdout=sys.stderr, stderr=sys.stderr)
        stack.callback(hop.end, process)
        hop.wait_ready(port)
        pool = stack.enter_context(ThreadPoolExecutor(_STREAMS))
        body = {
            "model": "model", "max_tokens": _TOKENS[tiny], "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip

        def answer(number: int) -> int:
            prompt = [100 + number] * _PROMPT_TOKENS
            *_, last = hop.stream(port, {**body, "prompt": prompt})
            return int(last["usage"]["completion_tokens"])

        list(pool.map(answer, range(_STREAMS)))  # a warm-up: captures graphs, loads libraries
        began = perf_counter()
        made = sum(pool.map(answer, range(_STREAMS)))
        seconds = perf_counter() - began
    if made != _STREAMS * _TOKENS[tiny]:
        raise SystemExit(f"TP {ranks}: {made} tokens instead of {_STREAMS * _TOKENS[tiny]}")
    return seconds
