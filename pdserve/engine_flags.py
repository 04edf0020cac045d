"""Check the flags of instances before one is started: an error appears at the command line, not in a child's log."""

import argparse
import os
from collections.abc import Mapping

from flags.options import EngineOptions
from pdserve.hub.download_job import is_hub_name
from pdserve.subprocess_call import run_in_fork
from wire.errors import ConfigError


def check_engine_flags(options: EngineOptions, instances: int = 1) -> None:
    """Raise ConfigError, with the value and the limit, for flags that so many `instances` on one host cannot use."""
    try:
        from instance.config import check_options, parse_port_range
        from kvtransfer.transport_table import need_port
    except ModuleNotFoundError:
        return  # the engine is not installed: the code that needs it reports that
    check_options(options)
    ports = parse_port_range(options.kv_port_range)
    if ports is None or not need_port(options.kv_transport):
        return
    ranks = options.tensor_parallel_size or 1
    num_ports = ports[1] - ports[0] + 1
    if num_ports < instances * ranks:
        raise ConfigError(
            f"--kv-port-range {options.kv_port_range!r} has {num_ports} port{'' if num_ports == 1 else 's'}, but "
            f"{instances * ranks} ranks need one each (instances: {instances}, ranks of each: {ranks})"
        )


def check_device(options: EngineOptions) -> None:
    """Raise ConfigError for a device requested by name that this machine cannot use.

    The check runs in a fork: a process that only starts instances must not import torch or open a card. An attention
    backend that exists only for one kind of device requires that kind.
    """
    from devices.table import AUTO, KINDS, choose, find_kind

    attention = options.attention_backend
    if options.engine != "fake" and options.device == AUTO:
        for kind in KINDS.values():
            if kind.traits.attention == attention and not (kind.traits.pools_on_host or kind.sees_card()):
                raise ConfigError(f"--attention-backend {attention}: no {kind.traits.kind} card is visible here")
    if options.engine == "fake" or options.device == AUTO or find_kind(options.device).traits.pools_on_host:
        return
    if not run_in_fork(lambda: choose(options.device)):
        choose(options.device)


def refuse_empty(namespace: argparse.Namespace, positional: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError for an empty flag value: a quoted unset variable would silently choose a default.

    `positional` names the fields that are positional arguments.
    """
    for name, value in vars(namespace).items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and not text.strip():
                flag = (positional or {}).get(name) or f"--{name.replace('_', '-')}"
                why = "as from an unset variable"
                raise ConfigError(f"{flag} {text!r} is empty, {why}: set a value or omit it")


def refuse_missing(model: str) -> None:
    """Raise ConfigError for a path that does not exist, before anything slow; hub names are looked up later."""
    if model and not os.path.exists(model) and not is_hub_name(model):
        raise ConfigError(f"--model {model} is not a folder")
