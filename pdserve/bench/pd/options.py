"""The flags of `pdserve bench pd`; engine flags are passed to every instance."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from devices.table import AUTO
from flags.options import EngineOptions, add_flags, flag, from_namespace
from pdserve.engine_flags import check_device
from pdserve.flags.parser import CommandParser
from pdserve.up_request import fill_model, to_flags, use_cpu_for_few_cards
from wire.errors import ConfigError

_DECIDED = ("host", "port", "ip", "kv_ip", "http_port", "share_devices", "tensor_parallel_size")
_NUM_INSTANCES = 2  # per contestant
EPILOG = """\
examples:
  pdserve bench pd                                 the default model: seven loads, P/D and colocated, ten minutes
  pdserve bench pd --quick                         small loads: to see that it works, not which wins
  pdserve bench pd --rounds 3 --json pd.json       medians of three starts of each, also as JSON
  pdserve bench pd --vllm ~/.cache/pdserve-peers/vllm/bin/python
                                                   also vLLM's pair and two of its replicas (benchmarks/peers)

Each contestant has all cores of this process, half of them per instance; scheduler and client share them.
P/D wins where prefill would delay running streams; colocated wins where one role of the pair is the bottleneck: the
lines under the table show which.
"""


@dataclass(frozen=True, slots=True)
class PdOptions:
    """Flags that only `bench pd` has."""

    quick: bool = flag(False, "small loads")
    rounds: int = flag(1, "starts of each contestant, in turn; figures are medians", parse=int)
    seed: int = flag(0, "seed of prompts and arrivals", parse=int)
    only: tuple[str, ...] = flag((), "loads whose name contains one of these (default: all)", many=True)
    vllm: str = flag("", "Python or `vllm` of an environment with vLLM's CPU build: measure its pair and replicas too")
    startup_timeout: float = flag(600.0, "seconds for each contestant to become ready", parse=float)
    json: str = flag("", "write the figures to this file")


@dataclass(frozen=True, slots=True)
class PdRequest:
    """The parsed options; `flags`, including `device`, are passed to every pdserve process."""

    options: PdOptions
    model: Path
    dtype: str
    flags: tuple[str, ...]
    cores: tuple[int, ...]
    device: str = AUTO


def parse(argv: Sequence[str]) -> PdRequest:
    """Parse the command line, with the default model if none is given. Raises ConfigError."""
    parser = CommandParser(
        prog="pdserve bench pd",
        usage="pdserve bench pd [flags]",
        description="Compare P/D with two colocated instances on the same cores.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser, PdOptions, "bench pd")
    add_flags(parser, EngineOptions)
    for action in parser._actions:
        if action.dest in _DECIDED:
            action.help = argparse.SUPPRESS
    namespace = parser.parse_args(argv)
    for name in _DECIDED:
        if name in namespace:
            raise ConfigError(f"--{name.replace('_', '-')} is set by `pdserve bench pd` itself: leave it out")
    options = from_namespace(PdOptions, namespace)
    if options.rounds < 1:
        raise ConfigError(f"--rounds {options.rounds}: must be at least 1")
    if not options.startup_timeout > 0:
        raise ConfigError(f"--startup-timeout {options.startup_timeout:g}: must be more than 0 s")
    if options.vllm and not os.access(options.vllm, os.X_OK):
        raise ConfigError(f"--vllm {options.vllm} is not executable: use the Python of vLLM's environment")
    fill_model(namespace)
    engine = from_namespace(EngineOptions, namespace)
    check_device(engine)
    use_cpu_for_few_cards(namespace, _NUM_INSTANCES)
    engine = from_namespace(EngineOptions, namespace)
    cores = tuple(sorted(os.sched_getaffinity(0)))
    return PdRequest(options, Path(engine.model), engine.dtype, to_flags(namespace), cores, engine.device)
