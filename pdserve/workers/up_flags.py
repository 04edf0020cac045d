"""The flags of `pdserve up --worker`: those that its workers get, and those that only pdserve's own engine has."""

import argparse
import dataclasses
import shlex
from collections.abc import Collection, Mapping
from typing import Final

from flags.options import EngineOptions
from pdserve.up_options import UpOptions
from pdserve.workers.kv_config import MOONCAKE_CLASS, connector_class
from pdserve.workers.program import find_program
from pdserve.workers.typed_flags import CONNECTOR
from ranktable_tools.worker_kind import worker_named
from wire.errors import ConfigError

_OF_VLLM: Final = (
    "model", "revision", "download_dir", "served_model_name", "dtype", "max_model_len", "max_num_seqs",
    "max_num_batched_tokens", "tensor_parallel_size", "quantization", "block_size", "gpu_memory_utilization",
    "enable_prefix_caching", "enforce_eager",
)  # fmt: skip
_OF_BOTH: Final = (*_OF_VLLM, CONNECTOR)
"""What a worker gets from the command line: vLLM's flags, and one that pdserve reads to start it."""
_OF_SCHEDULER: Final = ("host", "port", "hub", "log_level", "log_format")


def check_up(options: UpOptions, connector: str, typed: Collection[str], environ: Mapping[str, str]) -> None:
    """Raise ConfigError for `typed` fields that workers of another engine do not have, and if vLLM is missing."""
    kind = worker_named(options.worker)
    if kind is None:
        if options.worker_args is not None:
            raise ConfigError(f"--worker-args {options.worker_args!r} is for --worker: set that too")
        return
    if options.ray:
        raise ConfigError(f"--worker {kind} with --ray: workers are started on this machine only")
    for field in dataclasses.fields(EngineOptions):
        if field.name in typed and field.name not in (*_OF_VLLM, *_OF_SCHEDULER):
            flag = f"--{field.name.replace('_', '-')}"
            raise ConfigError(f"{flag} is for pdserve's own engine: leave it out; --worker-args takes vLLM's flags")
    if connector_class(kind, connector) == MOONCAKE_CLASS and options.prefill > 1:
        raise ConfigError(
            f"--prefill {options.prefill} with --worker {kind} --connector {connector}: a host can have only one "
            "prefill worker"
        )
    find_program(kind, environ)


def shared_flags(namespace: argparse.Namespace) -> argparse.Namespace:
    """Return the fields that workers get too."""
    return argparse.Namespace(**{name: value for name, value in vars(namespace).items() if name in _OF_BOTH})


def typed_args(options: UpOptions) -> tuple[str, ...]:
    """Return the words of --worker-args. Raises ConfigError."""
    try:
        return tuple(shlex.split(options.worker_args or ""))
    except ValueError as error:
        raise ConfigError(f"--worker-args {options.worker_args!r}: {error}") from error
