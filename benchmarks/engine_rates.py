"""Rates of one engine, and with --peer vllm also of vLLM, against the machine's limits: `pdserve bench engine`.

python benchmarks/engine_rates.py --help
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pdserve.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "engine", *sys.argv[1:]]))
