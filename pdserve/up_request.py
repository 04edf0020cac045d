"""Parse the command line of `pdserve up`."""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flags.options import EngineOptions, add_flags, from_namespace
from pdserve import model
from pdserve.card_shortage import why_cpu
from pdserve.engine_flags import check_device, check_engine_flags, refuse_empty
from pdserve.flags.parser import CommandParser
from pdserve.model_flags import download_flags, with_plain_model
from pdserve.ray_cluster.address import parse_address
from pdserve.running_workers import NO_WORKERS, RunningWorkers, running_workers, with_model_of
from pdserve.subprocess_call import run_in_fork
from pdserve.up_options import UpOptions
from pdserve.workers.up_flags import check_up, shared_flags, typed_args
from ranktable_tools.tables import WorkerKind
from ranktable_tools.worker_kind import worker_named
from scheduler.config import SchedulerConfig, SchedulerOptions
from scheduler.model.files import read_model_files
from wire.errors import ConfigError
from wire.shared_limits import MAX_SCHEDULERS

DEFAULT_PORT = 9000
EPILOG = """\
examples:
  pdserve up                                       one prefill, one decode instance; Ctrl-C stops it
  pdserve up --detach                              the same, and returns when it is ready
  pdserve up --prefill 2 --decode 2 --model ~/models/Qwen3-0.6B
  pdserve up --kv-transport tcp --max-model-len 4096 --kv-cache-memory 2GiB
  pdserve up --ray --address 10.0.0.18:6379 --device npu --tensor-parallel-size 2 --prefill 2 --decode 2
                                                   on the nodes of a Ray cluster; not run on NPUs yet
  pdserve up --worker vllm --model ~/models/Qwen3-0.6B
                                                   vLLM's workers in place of pdserve's own instances
"""
_DECIDED = ("global_rank_table", "node_ports", "use_openai", "http_port", "ip", "kv_ip", "share_devices")
_MAX_HERE = 64  # instances; each is a process with its own KV pool
_MAX_WITH_RAY = 1024  # instances on several machines; each has a link to every one of the other role
_ANY_HOST = ("0.0.0.0", "::", "localhost")  # noqa: S104 - compared, never bound


@dataclass(frozen=True, slots=True)
class UpRequest:
    """A cluster to start. Each process gets `flags` in addition to host and port; each worker gets `worker_flags`."""

    options: UpOptions
    engine: EngineOptions
    startup_timeout_s: float
    shutdown_timeout_s: float
    flags: tuple[str, ...]
    api_keys: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    certfile: str | None = None
    worker_flags: tuple[str, ...] = ()
    running: RunningWorkers = NO_WORKERS

    @property
    def worker(self) -> WorkerKind | None:
        """The engine of the instances, None for pdserve's own."""
        return worker_named(self.options.worker)

    @property
    def base_url(self) -> str:
        """The URL of the cluster from this machine."""
        return self._url(self.engine.port)

    @property
    def scheduler_ports(self) -> tuple[int, ...]:
        """The port of each scheduler: --port for a single one, the ports after it for several."""
        port, number = self.engine.port, self.options.schedulers
        return (port,) if number == 1 else tuple(range(port + 1, port + 1 + number))

    @property
    def scheduler_urls(self) -> tuple[str, ...]:
        """The URL of each scheduler from this machine."""
        return tuple(map(self._url, self.scheduler_ports))

    def _url(self, port: int) -> str:
        host = "127.0.0.1" if self.engine.host in _ANY_HOST else self.engine.host
        scheme = "http" if self.certfile is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def parse(argv: Sequence[str]) -> UpRequest:
    """Parse the command line, with the default model if none is given. Raises ConfigError."""
    parser = CommandParser(
        serves=True,
        prog="pdserve up",
        usage="pdserve up [flags]",
        description="Start a scheduler and its prefill and decode instances on this machine.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for options_type, title in ((UpOptions, "cluster"), (EngineOptions, None), (SchedulerOptions, None)):
        add_flags(parser, options_type, title)
    for action in parser._actions:
        if action.dest in _DECIDED:
            action.help = argparse.SUPPRESS  # still parsed, so that the error explains the refusal
    namespace = parser.parse_args(argv)
    refuse_empty(namespace)
    for name in _DECIDED:
        if name in parser.from_file:
            delattr(namespace, name)  # the file is shared by all commands
        elif name in namespace:
            raise ConfigError(f"--{name.replace('_', '-')} is set by `pdserve up` itself: leave it out")
    options = from_namespace(UpOptions, namespace)
    connector = from_namespace(SchedulerOptions, namespace).connector
    running = running_workers(
        options.prefill_workers, options.decode_workers, options.combined_workers, connector, "--{}-workers"
    )
    _check_counts(options, running)
    if options.max_restarts < 0 or not options.restart_window > 0:
        given = f"--max-restarts {options.max_restarts} --restart-window {options.restart_window:g}"
        raise ConfigError(f"{given}: restarts must be 0 or more, and the window more than 0 s")
    if options.address is not None:
        if not options.ray:
            raise ConfigError(f"--address {options.address} is the address of a Ray cluster: set --ray too")
        parse_address(options.address)
    namespace.port = getattr(namespace, "port", DEFAULT_PORT)
    if not 0 < namespace.port < 65536:
        raise ConfigError(f"--port {namespace.port} is not in 1..65535")
    check_engine_flags(from_namespace(EngineOptions, namespace), options.prefill + options.decode)
    check_up(options, connector, vars(namespace).keys() - set(parser.from_file), os.environ)
    if not options.ray and options.worker is None and options.prefill:
        check_device(from_namespace(EngineOptions, namespace))
        use_cpu_for_few_cards(namespace, options.prefill + options.decode)
    downloads = download_flags(from_namespace(EngineOptions, namespace), os.environ) if options.address else {}
    if running.urls:
        _take_model(namespace, running)
    fill_model(namespace, weights=options.prefill > 0)
    config = SchedulerConfig(from_namespace(EngineOptions, namespace), from_namespace(SchedulerOptions, namespace))
    _check_schedulers(options, config)
    waits = config.options.startup_timeout, config.options.shutdown_timeout
    flags = to_flags(argparse.Namespace(**vars(namespace) | downloads))
    workers = (*to_flags(shared_flags(namespace)), *typed_args(options)) if options.worker else ()
    keys, certificate = config.options.api_key, config.options.ssl_certfile
    return UpRequest(options, config.engine, *waits, flags, keys, certificate, workers, running)


def _take_model(namespace: argparse.Namespace, running: RunningWorkers) -> None:
    """Set the model, its names and its maximum length to the running workers', where no flag sets them."""
    options = from_namespace(SchedulerOptions, namespace)
    engine = with_model_of(running, from_namespace(EngineOptions, namespace), options)
    namespace.model = engine.model
    if engine.served_model_name:
        namespace.served_model_name = list(engine.served_model_name)
    if engine.max_model_len is not None:
        namespace.max_model_len = engine.max_model_len


def use_cpu_for_few_cards(namespace: argparse.Namespace, num_instances: int) -> None:
    """Choose the CPU if `auto` would give two ranks one card, and print the reason."""
    engine = from_namespace(EngineOptions, namespace)
    why = why_cpu(engine.device, num_instances * (engine.tensor_parallel_size or 1), os.environ)
    if why is not None and engine.engine != "fake":
        print(f"--device {engine.device}: all instances run on the CPU, because {why}", file=sys.stderr)
        namespace.device = "cpu"


def _check_schedulers(options: UpOptions, config: SchedulerConfig) -> None:
    """Refuse an out-of-range number of schedulers, and options that several schedulers cannot share."""
    number, last = options.schedulers, config.engine.port + options.schedulers
    if not 1 <= number <= MAX_SCHEDULERS:
        raise ConfigError(f"--schedulers {number} is not in 1..{MAX_SCHEDULERS}")
    if number == 1:
        return
    if last > 65535:
        given = f"--schedulers {number} --port {config.engine.port}"
        raise ConfigError(f"{given}: the last scheduler's port is {last}, but the limit is 65535")
    if config.options.responses_store is not None:
        raise ConfigError(
            f"--responses-store belongs to one scheduler: leave it out, or leave out --schedulers {number}"
        )
    callbacks = config.options.callback_place()
    if callbacks is not None and callbacks[1] != 0:
        raise ConfigError(f"--worker-callback has one port: leave it out, or leave out --schedulers {number}")


def _check_counts(options: UpOptions, running: RunningWorkers) -> None:
    total, typed = options.prefill + options.decode, f"--prefill {options.prefill} --decode {options.decode}"
    if running.urls and options.ray:
        raise ConfigError("--ray with running workers is not supported: use one or the other")
    if options.prefill == options.decode == 0 and running.prefill and running.decode:
        return
    if options.prefill < 1 or options.decode < 1:
        raise ConfigError(f"{typed}: use at least one of each, or none if there are running workers of both roles")
    if options.address is not None and total > _MAX_WITH_RAY:
        raise ConfigError(f"{typed}: {total} instances, but the limit of one cluster is {_MAX_WITH_RAY}: use fewer")
    if options.address is None and total > _MAX_HERE:
        other = "--address of a Ray cluster of" if options.ray else "--ray --address HOST:PORT for"
        given = f"{total} instances, but the limit of one machine is {_MAX_HERE}"
        raise ConfigError(f"{typed}: {given}: use fewer, or {other} several machines")


def fill_model(namespace: argparse.Namespace, *, weights: bool = True) -> None:
    """Set the default model if none is given, and raise --max-num-batched-tokens to the maximum length."""
    if not getattr(namespace, "model", ""):
        run_in_fork(
            lambda: model.ensure_default(os.environ)
        )  # building it imports torch, which the supervisor must not
        namespace.model = str(model.ensure_default(os.environ))
        namespace.served_model_name = [*getattr(namespace, "served_model_name", []), Path(namespace.model).name]
    _make_plain(namespace, weights)
    step = getattr(namespace, "max_num_batched_tokens", None)
    if step is None:
        return
    length = read_model_files(namespace.model, getattr(namespace, "max_model_len", None)).max_model_len
    if step < length:
        print(f"--max-num-batched-tokens {step} is below the maximum length: using {length}", file=sys.stderr)
        namespace.max_num_batched_tokens = length


def _make_plain(namespace: argparse.Namespace, weights: bool) -> None:
    """Replace a hub name, GGUF file or .bin weights by the prepared folder, so that no process has to wait for it."""
    options = from_namespace(EngineOptions, namespace)
    plain = with_plain_model(options, os.environ, weights=weights)
    if plain != options:
        namespace.model, namespace.served_model_name = plain.model, list(plain.served_model_name)
        for name in ("quantization", "revision", "download_dir", "hub"):
            if getattr(plain, name) is None:
                vars(namespace).pop(name, None)


def to_flags(namespace: argparse.Namespace) -> tuple[str, ...]:
    """Return the given engine and scheduler flags as a command line, without host, port and keys."""
    flags: list[str] = []
    for field in (*dataclasses.fields(EngineOptions), *dataclasses.fields(SchedulerOptions)):
        if field.name in namespace and field.name not in ("host", "port", "api_key"):
            value, name = getattr(namespace, field.name), field.name.replace("_", "-")
            if isinstance(value, bool):
                flags.append(f"--{name}" if value else f"--no-{name}")
                continue
            flags.append(f"--{name}")
            if isinstance(value, tuple):
                flags.append(json.dumps(value))
            else:
                flags.extend(map(str, value) if isinstance(value, list) else [str(value)])
    return tuple(flags)
