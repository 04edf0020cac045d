"""`pdserve bench`: select and run a benchmark."""

import importlib
from collections.abc import Callable, Sequence

from wire.errors import ConfigError

BENCHMARKS = {
    "engine": "prefill, decode and offline rates of one engine, compared with the machine's floors and optionally vLLM",
    "serve": "load on any OpenAI server: TTFT, TPOT, longest gap and goodput, as a table, JSON and a plot",
    "pd": "P/D compared with two colocated instances on the same cores: which wins, and where",
}

HELP = """\
usage: pdserve bench COMMAND [flags]

Measure the product on this machine.

{commands}

  pdserve bench serve --num-prompts 100 --random-input-len 256 --random-output-len 64 --ignore-eos
  pdserve bench engine --only 'batch 8'
  pdserve bench pd --quick

`pdserve bench COMMAND --help` lists its flags.
"""


def main(argv: Sequence[str]) -> int:
    """Run one benchmark. Raises ConfigError for an unknown one."""
    if not argv or argv[0] in ("-h", "--help"):
        commands = "\n".join(f"  {name:<8} {what}" for name, what in BENCHMARKS.items())
        print(HELP.format(commands=commands), end="")
        return 0
    if argv[0] not in BENCHMARKS:
        raise ConfigError(f"there is no benchmark {argv[0]!r}, only {', '.join(BENCHMARKS)} (`pdserve bench --help`)")
    run: Callable[[Sequence[str]], int] = importlib.import_module(f"pdserve.bench.{argv[0]}").main
    return run(argv[1:])
