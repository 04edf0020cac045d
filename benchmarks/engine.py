"""Rates of one engine in one process, beside what this machine allows and, if asked, beside vLLM, in the same run.

    python benchmarks/engine.py                      the default model, all cores
    python benchmarks/engine.py --peer vllm          in turn with vLLM's CPU build (benchmarks/peers/setup vllm)
    python benchmarks/engine.py MODEL --threads 1 --dtype float32
    python benchmarks/engine.py --profile            where steps spend their time, on native kernels

Prompts of random tokens, greedy, no end of sequence, nothing cached between runs. Contestants take turns, round by
round; a figure is the median of --repeats rounds, a ratio that of the medians. The rate of decoding takes the prefill's
time off the whole run's: the difference of two long times, which means little on a disturbed machine, so
`median_full_step_ms` times each step that decodes the whole batch and nothing else. `fraction` is the floor's time over
the time taken: a step reads the weights and the batch's KV once and multiplies, at the speeds measured here, whichever
takes longer. JSON lines, then the table as Markdown.
"""

import argparse
import json
import os
import signal
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.rates.cases import Case, Run, Times, all_cases, goals
from benchmarks.rates.floors import Floors, measure_floors
from benchmarks.rates.vllm import Missing, Vllm
from engine.torch_start import prepare_torch

KV_BYTES = 2 << 30
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def main() -> None:
    """Load, measure the machine, the engine and the peer in turn, print JSON lines and the table."""
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))  # so that the peer is ended too
    threads = args.threads or len(os.sched_getaffinity(0))
    prepare_torch(threads)
    from benchmarks.rates.ours import Ours
    from benchmarks.rates.step_profile import profile
    from engine.loader import load_model

    path = Path(args.model) if args.model else default_model()
    loaded = load_model(path, dtype=args.dtype, block_size=16, kv_cache_memory=KV_BYTES, num_threads=threads)
    info = loaded.model.info
    name, flags = cpu()
    say(
        measure="setup", model=info.model.name, dtype=info.dtype, threads=threads, chunk=args.chunk, cpu=name,
        cpu_flags=flags, notes=loaded.notes,
    )  # fmt: skip
    if args.profile:
        profile(loaded.model, say)
        return
    ours = Ours(loaded.model, args.chunk)
    ours.time(Run(2, 32, 8))
    floors = measure_floors(path, info, say)
    peer = start_peer(args, path, info.dtype)
    cases = [case for case in all_cases() if args.only in case.measure]
    try:
        times = [Times(), Times()]
        for _ in range(args.repeats):
            one_round(cases, [ours] if peer is None else [ours, peer], times)
        report(cases, times[0], None if peer is None else times[1], floors, ours.full_steps_s)
    finally:
        if peer is not None:
            peer.close()


def start_peer(args: argparse.Namespace, path: Path, dtype: str) -> Vllm | None:
    """Return the peer that was asked for, ready."""
    if args.peer is None:
        return None
    try:
        peer = Vllm(path, dtype=args.peer_dtype or dtype)
    except Missing as error:
        sys.exit(str(error))
    say(measure="peer", name=f"vLLM {peer.version}", dtype=args.peer_dtype or dtype, cores=peer.bound_to)
    return peer


def one_round(cases: Sequence[Case], contestants: Sequence[object], times: Sequence[Times]) -> None:
    """Time every run once with each contestant, one after another."""
    for case in cases:
        for run in case.runs:
            for contestant, its_times in zip(contestants, times, strict=False):
                its_times.add(run, contestant.time(run))  # type: ignore[attr-defined]


def report(
    cases: Sequence[Case], ours: Times, peer: Times | None, floors: Floors, full_steps_s: dict[int, list[float]]
) -> None:
    """Print a JSON line for each case, then the table."""
    rows = []
    for case in cases:
        fields: dict[str, object] = {"measure": case.measure, "tokens_per_s": ours.rate(case)}
        fields["fraction"] = floors.case_s(case) / ours.case_s(case)
        if case.before is not None:
            step_s = statistics.median(full_steps_s[case.run.requests])
            fields["median_full_step_ms"] = 1000 * step_s
            fields["floor_ms_per_step"] = 1000 * floors.case_s(case) / (case.run.out - case.before.out)
        if peer is not None:
            fields["peer_tokens_per_s"] = peer.rate(case)
            fields["ratio"], fields["goal"] = ours.rate(case) / peer.rate(case), goals()[case.measure]
        say(**fields)
        rows.append(fields)
    print("\n" + table(rows, with_peer=peer is not None))


def table(rows: Sequence[dict[str, object]], *, with_peer: bool) -> str:
    """Return the rows as Markdown."""
    names = ("measure", "tokens_per_s", "fraction", *(("peer_tokens_per_s", "ratio", "goal") if with_peer else ()))
    titles = {"tokens_per_s": "pdserve, tok/s", "fraction": "of the floor", "peer_tokens_per_s": "vLLM, tok/s"}
    lines = [" | ".join(titles.get(name, name) for name in names), "|".join(["---"] * len(names))]
    lines += [" | ".join(f"{row[n]:.3g}" if isinstance(row[n], float) else str(row[n]) for n in names) for row in rows]
    return "\n".join(f"| {line} |" if "---" not in line else f"|{line}|" for line in lines)


def say(**fields: object) -> None:
    """Print one JSON line; numbers to four digits."""
    short = {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in fields.items()}
    print(json.dumps(short), flush=True)


def default_model() -> Path:
    """Return the folder of the default model."""
    from pdserve.model import ensure_default

    return ensure_default(os.environ)


def cpu() -> tuple[str, list[str]]:
    """Return the CPU's name and which of the instruction sets that matter here it has."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "").split()
    return name, [flag for flag in CPU_FLAGS if flag in flags]


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="folder of the model (default: the default model)")
    parser.add_argument("--threads", type=int, help="threads of the engine (default: the cores of this process)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--chunk", type=int, default=512, help="--prefill-chunk-size (default: 512)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--only", default="", help="rows whose name has this in it, 'decode, batch 1' say")
    parser.add_argument("--peer", choices=("vllm",), help="measure it in turn with ours")
    parser.add_argument("--peer-dtype", choices=("bfloat16", "float32"), help="default: ours")
    parser.add_argument("--profile", action="store_true", help="print where the time goes instead of rates")
    return parser.parse_args()


if __name__ == "__main__":
    main()
