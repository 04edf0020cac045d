"""Our engine on one GPU, in absolute figures and as fractions of what the device can do.

    python -P benchmarks/gpu.py                                everything, one table: shapes of 1B and 8B in bfloat16
    python -P benchmarks/gpu.py --shapes 1b --parts layers steps --json rows.json
    python -P benchmarks/gpu.py --device cpu --tiny            every part on a tiny model: a smoke run, never judged

part      | what                                                       | limit                     | goal
limits    | a copy within the device, a product of matrices            |                           |
layers    | a decode step without attention, as transformers           | bytes read                |
          | writes it and by the device's own ops                      |                           |
steps     | decode after 2,048 tokens, in batches; prefill 4 x 2,048   | bytes read; products      | 70% at batch 1; 60%
peers     | vLLM if installed, else transformers, eager and SDPA       | the same                  |
hand-off  | KV between two processes by cuda_ipc                       | a copy within the device  | 80%
pd        | P and D on the device against one combined instance; gaps  | gaps without KV           |
          | between tokens on D while KV arrives                       |                           |
tp        | tokens/s of 32 streams on two devices against one          | the same on one device    | 160%

Fractions are of an H200's limits (4.3 TB/s, 788 TFLOP/s), or with --limits here of those measured in the same run.
Without a GPU it prints a line and measures nothing.
"""

import argparse
import json
import platform
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine.torch_start import name_backends

PARTS = ("limits", "layers", "steps", "peers", "hand-off", "pd", "tp")
_DEFAULT = PARTS[:-1]  # tp needs two devices


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="kind of device (default: cuda)")
    parser.add_argument("--shapes", nargs="+", default=["1b", "8b"], choices=("1b", "8b"), help="default: 1b 8b")
    parser.add_argument(
        "--parts", nargs="+", default=_DEFAULT, choices=PARTS, help="what to measure (default: all but tp)"
    )
    parser.add_argument("--rounds", type=int, help="timed rounds per figure (default: 20, with --tiny 2)")
    parser.add_argument(
        "--limits", default="h200", choices=("h200", "here"), help="limits to compare with (default: h200)"
    )
    parser.add_argument("--transport", help="KV transport of hand-off and pd (default: the device's first)")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of each instance of pd (default: 1)")
    parser.add_argument("--tiny", action="store_true", help="a smoke run on a tiny model")
    parser.add_argument("--json", metavar="FILE", help="also write the rows to FILE")
    args = parser.parse_args(arguments)
    args.rounds = args.rounds or (2 if args.tiny else 20)
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; print a line for each figure as it is ready, and the table at the end."""
    args = parse(arguments)
    name_backends()
    from devices.table import find_kind
    from wire.errors import ConfigError

    try:
        kind = find_kind(args.device)
        lacking = kind.lacking()
    except ConfigError as error:
        lacking = str(error)
    if lacking is not None:
        print(f"benchmarks/gpu.py: nothing is measured: {lacking}")
        return 0
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # so that started processes are stopped
    from benchmarks.card.parts import measure
    from benchmarks.card.rows import markdown

    device = kind.open()
    device.activate()
    about = f"{device.describe()}; Python {platform.python_version()}; {args.rounds} rounds"
    print(about, flush=True)
    rows = []
    for row in measure(args, device):
        rows.append(row)
        print(" ".join(cell for cell in row.cells() if cell), file=sys.stderr, flush=True)
        if args.json:  # after each row: a run that is stopped leaves the rows measured so far
            document = {"about": about, "tiny": args.tiny, "rows": [row.document() for row in rows]}
            Path(args.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(markdown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
