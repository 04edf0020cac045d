"""`pdserve bench engine`: rates of one engine, compared with this machine's limits and optionally with vLLM.

Prompts are random tokens; decoding is greedy, without end of sequence or prefix cache. Contestants take turns, round
by round; a figure is the median over the rounds, and a ratio is that of the medians. The decode rate subtracts the
prefill's time from the whole run's: this difference of two long times is unreliable on a disturbed machine, and
meaningless (null, in the table `disturbed`) if the prefill alone took longer. Therefore `median_full_step_ms` times
each step that decodes the whole batch and nothing else. `fraction` is the floor's time over the time taken. A step's
floor is the longer of two times: to read the weights and the batch's KV once, and to multiply, at the speeds measured
here before and after the runs (the better of the two). A row is printed when it is finished, with the floor measured
before the runs; the table uses the better floor. Rows `Python per step` follow where native kernels run the model
(python_time.py). The output is JSON lines, then the table as Markdown.
"""

import argparse
import contextlib
import json
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from devices.table import AUTO, AUTO_ORDER, choose
from engine.torch_start import prepare_torch
from flags.options import EngineOptions, add_flags, flag, from_namespace
from native.cache import NoNative
from native.engine_library import build_engine
from pdserve import model
from pdserve.bench import python_time
from pdserve.bench.cases import BenchCase, BenchRun, Times, all_cases, goals
from pdserve.bench.floors import Floors, measure_floors
from pdserve.bench.vllm import PeerMissing, Vllm
from pdserve.flags.parser import CommandParser
from pdserve.termination import unwind_on_sigterm
from ranktable_tools.core_quota import usable_threads
from wire.errors import ConfigError

KV_BYTES = 2 << 30
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
EPILOG = """\
examples:
  pdserve bench engine                        the default model, all cores of this process
  pdserve bench engine --peer vllm            in turn with vLLM's CPU build (in a clone: benchmarks/peers/setup vllm)
  pdserve bench engine --only 'batch 8' 512   only some rows
  pdserve bench engine --only Python          the time of a step outside native code and torch kernels, in ms
  pdserve bench engine --profile --threads 1  where steps spend their time, with native kernels
"""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Flags of `bench engine`."""

    model: str = flag("", "folder of the model (default: SmolLM2-135M-Instruct)")
    device: str = flag(AUTO, f"device to measure: {AUTO}, {', '.join(reversed(AUTO_ORDER))}; auto: as for serving")
    dtype: str = flag("auto", "dtype of weights and KV", choices=("auto", "float32", "bfloat16"))
    threads: int | None = flag(None, "threads of the engine (default: the cores of this process)", parse=int)
    chunk: int = flag(512, "maximum prompt tokens per step, like --prefill-chunk-size", parse=int)
    repeats: int = flag(3, "rounds", parse=int)
    only: tuple[str, ...] = flag((), "rows whose name contains one of these (default: all)", many=True)
    peer: str | None = flag(None, "other engine to measure alternately (default: none)", choices=("vllm",))
    peer_dtype: str | None = flag(None, "dtype of the peer (default: ours)", choices=("bfloat16", "float32"))
    profile: bool = flag(False, "show where a step spends its time, instead of rates")


class EngineContestant(Protocol):
    """A timed engine."""

    def time(self, run: BenchRun) -> float:
        """Return the seconds of a run."""
        ...


def main(argv: Sequence[str]) -> int:
    """Load the model, measure the machine, the engine and the peer, print JSON lines and the table."""
    options = parse(argv)
    unwind_on_sigterm()
    threads = options.threads or usable_threads()
    prepare_torch(threads)
    choice = choose(options.device)
    device = choice.kind.open()
    if device.traits.pools_on_host:
        with contextlib.suppress(NoNative):  # then the notes report that torch is measured
            build_engine()
    from engine.loader import load_model
    from pdserve.bench.engine_core import MAX_SEQUENCES, OwnEngine
    from pdserve.bench.step_profile import profile

    path = model.find_folder(os.environ, EngineOptions(model=options.model))
    loaded = load_model(
        path, dtype=options.dtype, block_size=device.traits.block_size, kv_cache_memory=KV_BYTES, num_threads=threads,
        name=Path(options.model or path).name, device=device, max_graph_rows=MAX_SEQUENCES,
    )  # fmt: skip
    info = loaded.model.info
    name, flags = cpu()
    say(
        measure="setup", model=info.model.name, dtype=info.dtype, threads=threads, chunk=options.chunk, cpu=name,
        cpu_flags=flags, notes=(f"{choice.reason} ({device.describe()})", *loaded.notes),
    )  # fmt: skip
    if options.profile:
        profile(loaded.model, say)
        return 0
    ours = OwnEngine(loaded.model, options.chunk)
    ours.time(BenchRun(2, 32, 8))
    floors = measure_floors(path, info, say, device)
    peer = start_peer(options, path, info.dtype)
    cases = chosen(options.only)
    try:
        times = (Times(), None if peer is None else Times())
        for case in timed(cases, [ours] if peer is None else [ours, peer], times, options.repeats):
            say(**row(case, *times, floors, ours.full_steps_s))
        python = list(time_python(loaded.model, options))
        if cases:
            floors = floors.better(measure_floors(path, info, say, device))
            rows = [row(case, *times, floors, ours.full_steps_s) for case in cases]
            print("\n" + table(rows, with_peer=peer is not None))
        for line in python:
            print(line)
    finally:
        if peer is not None:
            peer.close()
    return 0


def parse(argv: Sequence[str]) -> BenchOptions:
    """Parse the command line. Raises ConfigError."""
    parser = CommandParser(
        prog="pdserve bench engine",
        description=(__doc__ or "").partition(": ")[2],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser, BenchOptions, "bench engine")
    options = from_namespace(BenchOptions, parser.parse_args(argv))
    if options.repeats < 1 or options.chunk < 1 or (options.threads or 1) < 1:
        raise ConfigError(
            f"--repeats is {options.repeats}, --chunk is {options.chunk} and --threads is "
            f"{options.threads or 'not set'}: each must be at least 1"
        )
    if not chosen(options.only) and not python_time.chosen(options.only):
        names = "; ".join([*(case.measure for case in all_cases()), *map(python_time.measure, python_time.CASES)])
        raise ConfigError(f"--only {' '.join(options.only)} matches none of: {names}")
    return options


def chosen(only: Sequence[str]) -> list[BenchCase]:
    """Return the rows whose name contains one of `only`; all if that is empty."""
    return [case for case in all_cases() if not only or any(part in case.measure for part in only)]


def time_python(model: Any, options: BenchOptions) -> Iterator[str]:
    """Run the selected cases of python_time.py; yield table lines, none without native kernels."""
    for name in python_time.chosen(options.only) if model._fused is not None else ():
        spent_ms = statistics.median(
            python_time.python_ms(model, python_time.CASES[name]) for _ in range(options.repeats)
        )
        say(measure=python_time.measure(name), unit="ms", median_ms=spent_ms)
        yield f"| {python_time.measure(name)} | {spent_ms:.3g} ms |"


def start_peer(options: BenchOptions, path: Path, dtype: str) -> Vllm | None:
    """Start the requested peer."""
    if options.peer is None:
        return None
    try:
        peer = Vllm(path, dtype=options.peer_dtype or dtype)
    except PeerMissing as error:
        raise ConfigError(str(error)) from error
    say(measure="peer", name=f"vLLM {peer.version}", dtype=options.peer_dtype or dtype, cores=peer.bound_to)
    return peer


def timed(
    cases: Sequence[BenchCase], contestants: Sequence[EngineContestant], times: Sequence[Times | None], repeats: int
) -> Iterator[BenchCase]:
    """Time the runs of each case `repeats` times, alternating contestants; yield each finished case."""
    for case in cases:
        for run in case.runs * repeats:
            for contestant, its_times in zip(contestants, times, strict=False):
                assert its_times is not None, "one for each contestant"
                its_times.add(run, contestant.time(run))
        yield case


def row(
    case: BenchCase, ours: Times, peer: Times | None, floors: Floors, full_steps_s: dict[int, list[float]]
) -> dict[str, object]:
    """Return the fields of a timed case."""
    rate = ours.rate(case)
    fields: dict[str, object] = {"measure": case.measure, "tokens_per_s": rate}
    fields["fraction"] = None if rate is None else floors.case_s(case) / ours.case_s(case)
    if case.before is not None:
        step_s = statistics.median(full_steps_s[case.run.requests])
        fields["median_full_step_ms"] = 1000 * step_s
        fields["floor_ms_per_step"] = 1000 * floors.case_s(case) / (case.run.out - case.before.out)
    if peer is not None:
        peer_rate = peer.rate(case)
        fields["peer_tokens_per_s"] = peer_rate
        fields["ratio"] = None if rate is None or peer_rate is None else rate / peer_rate
        fields["goal"] = goals()[case.measure]
    return fields


def table(rows: Sequence[dict[str, object]], *, with_peer: bool) -> str:
    """Return the rows as Markdown."""
    names = ("measure", "tokens_per_s", "fraction", *(("peer_tokens_per_s", "ratio", "goal") if with_peer else ()))
    titles = {"tokens_per_s": "pdserve, tok/s", "fraction": "of the floor", "peer_tokens_per_s": "vLLM, tok/s"}
    lines = [" | ".join(titles.get(name, name) for name in names), "|".join(["---"] * len(names))]
    lines += [" | ".join(_cell(row[name]) for name in names) for row in rows]
    return "\n".join(f"| {line} |" if "---" not in line else f"|{line}|" for line in lines)


def _cell(value: object) -> str:
    return "disturbed" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def say(**fields: object) -> None:
    """Print one JSON line, with numbers to four digits."""
    short = {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in fields.items()}
    print(json.dumps(short), flush=True)


def cpu() -> tuple[str, list[str]]:
    """Return the CPU's name and its relevant instruction sets."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "").split()
    return name, [flag for flag in CPU_FLAGS if flag in flags]
