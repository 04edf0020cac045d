"""The flags of `pdserve bench pd`; the engine's go to every instance."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from devices.table import AUTO
from pdserve.engine_flags import check_device
from pdserve.flags.parser import CommandParser
from pdserve.up_request import fill_model, stay_off_few_cards, to_flags
from wire.errors import ConfigError
from wire.options import EngineOptions, add_flags, flag, from_namespace

_DECIDED = ("host", "port", "ip", "kv_ip", "http_port", "share_devices", "tensor_parallel_size")
_NUM_INSTANCES = 2  # of each contestant
EPILOG = """\
examples:
  pdserve bench pd                                 the default model: four loads, P/D and colocated, a few minutes
  pdserve bench pd --quick                         small loads: does it work, not which wins
  pdserve bench pd --rounds 3 --json pd.json       medians of three starts of each, figures as JSON too
  pdserve bench pd --vllm ~/.cache/pdserve-peers/vllm/bin/python
                                                   beside vLLM's pair and two of its replicas (benchmarks/peers)

Each contestant has all cores of this process, half of them an instance; the front door and the client share them.
P/D wins where prefill would hold up running streams; colocated wins where one role of the pair is the limit: the lines
under the table say which it was.
"""


@dataclass(frozen=True, slots=True)
class PdOptions:
    """Flags of `bench pd` alone."""

    quick: bool = flag(False, "small loads")
    rounds: int = flag(1, "starts of each contestant, in turn; figures are medians", parse=int)
    seed: int = flag(0, "of prompts and arrivals", parse=int)
    only: tuple[str, ...] = flag((), "loads whose name has one of these in it (default: all)", many=True)
    vllm: str = flag("", "Python or `vllm` of an environment with vLLM's CPU build: its pair and replicas too")
    startup_timeout: float = flag(600.0, "seconds that each contestant has to be ready", parse=float)
    json: str = flag("", "write the figures into this file")


@dataclass(frozen=True, slots=True)
class PdRequest:
    """What was typed; `flags`, which have `device` too, go to every process of ours."""

    options: PdOptions
    model: Path
    dtype: str
    flags: tuple[str, ...]
    cores: tuple[int, ...]
    device: str = AUTO


def parse(argv: Sequence[str]) -> PdRequest:
    """Return what was typed, with the default model where none was named. Raises ConfigError."""
    parser = CommandParser(
        prog="pdserve bench pd",
        usage="pdserve bench pd [flags]",
        description="Measure prefill and decode apart beside two colocated instances on the same cores.",
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
            raise ConfigError(f"--{name.replace('_', '-')} is decided by `pdserve bench pd` itself: leave it out")
    options = from_namespace(PdOptions, namespace)
    if options.rounds < 1:
        raise ConfigError(f"--rounds {options.rounds}: at least 1")
    if not options.startup_timeout > 0:
        raise ConfigError(f"--startup-timeout {options.startup_timeout:g}: more than 0 s")
    if options.vllm and not os.access(options.vllm, os.X_OK):
        raise ConfigError(f"--vllm {options.vllm} is no program: give the Python of vLLM's environment")
    fill_model(namespace)
    engine = from_namespace(EngineOptions, namespace)
    check_device(engine)
    stay_off_few_cards(namespace, _NUM_INSTANCES)
    engine = from_namespace(EngineOptions, namespace)
    cores = tuple(sorted(os.sched_getaffinity(0)))
    return PdRequest(options, Path(engine.model), engine.dtype, to_flags(namespace), cores, engine.device)
