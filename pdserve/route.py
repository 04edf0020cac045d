"""`pdserve route`: one scheduler in front of running vLLM workers."""

import argparse
import asyncio
import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from flags.options import EngineOptions, add_flags, flag, from_namespace
from native.ticker import start_ticker
from pdserve.flags.parser import CommandParser
from pdserve.model_flags import with_plain_model
from pdserve.ports import require_free
from ranktable_tools.addresses import HostComparer, canonical, host_problem
from scheduler.config import DEFAULT_PORT, SchedulerConfig, SchedulerOptions
from scheduler.loop import run
from scheduler.membership.compatibility import ExpectedInstance
from scheduler.observability.traces import check_traces
from scheduler.process import serve_cluster
from scheduler.serving import Cluster
from scheduler.workers.callbacks import Callbacks
from scheduler.workers.connection import WorkerConnection
from scheduler.workers.connectors import AUTO, DECODE_FIRST, NOT_SERVED, PATHS
from scheduler.workers.served_model import ServedModel, find_served_model
from telemetry import logs
from wire.errors import ConfigError, Unavailable
from wire.types import Role

EPILOG = """\
examples:
  pdserve route --prefill http://10.0.0.1:8100 --decode http://10.0.0.2:8200
  pdserve route --prefill http://10.0.0.1:8100 http://10.0.0.3:8100 --decode http://10.0.0.2:8200 --port 9000
  pdserve route --combined http://10.0.0.1:8000 http://10.0.0.2:8000

The workers run already; they are neither started, changed nor stopped. docs/route.md says how to start them.
"""
_ENGINE_FLAGS = (
    "model", "revision", "download_dir", "hub", "served_model_name", "host", "port", "max_model_len", "log_level",
    "log_format",
)  # fmt: skip
_TABLE_FLAGS = ("global_rank_table", "node_ports")


@dataclasses.dataclass(frozen=True, slots=True)
class RouteOptions:
    """Flags of `pdserve route` only."""

    prefill: tuple[str, ...] = flag((), "URLs of the workers that prefill, such as http://10.0.0.1:8100", many=True)
    decode: tuple[str, ...] = flag((), "URLs of the workers that decode", many=True)
    combined: tuple[str, ...] = flag((), "URLs of workers that do both", many=True)
    worker_api_key_file: str | None = flag(None, "file with the key that the workers want (default: none)")
    connector: str = flag(
        AUTO, "the workers' KV connector: nixl (NixlConnector), ascend (MooncakeConnectorV1), ascend-layerwise "
        "(MooncakeLayerwiseConnector); auto is either of the first two",
        choices=(*PATHS, *NOT_SERVED),
    )  # fmt: skip
    worker_callback: str | None = flag(
        None, "HOST:PORT at which decode workers call back (--connector ascend-layerwise only; port 0 is a free one; "
        "default: 127.0.0.1:0, for workers on this machine)",
    )  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Serve until SIGTERM or Ctrl-C. Raises ConfigError for wrong input."""
    routes, engine, options = parse(argv)
    require_free(engine.host, engine.port)
    logs.configure(engine.log_level, log_format=engine.log_format)
    check_traces(options.otlp_traces_endpoint, os.environ)
    key = _key(routes.worker_api_key_file)
    expected = tuple(_expected(routes))
    start_ticker()
    engine = _with_model_of(engine, expected, key)
    engine = with_plain_model(engine, os.environ, weights=False)
    callbacks = make_callbacks(routes)

    def connect(address: str) -> WorkerConnection:
        return WorkerConnection(address, api_key=key, connector=routes.connector, callbacks=callbacks)

    async def serve() -> None:
        try:
            await serve_cluster(SchedulerConfig(engine, options), Cluster(expected, connect))
        finally:
            await callbacks.close()

    run(serve())
    return 0


def parse(argv: Sequence[str]) -> tuple[RouteOptions, EngineOptions, SchedulerOptions]:
    """Parse the command line. Raises ConfigError."""
    parser = CommandParser(
        serves=True,
        prog="pdserve route",
        usage="pdserve route --prefill URL [URL ...] --decode URL [URL ...] [flags]",
        description="Serve the OpenAI API from running vLLM workers: each prompt is prefilled on one and decoded on "
        "another, or served whole by a combined one.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    unused = [field.name for field in dataclasses.fields(EngineOptions) if field.name not in _ENGINE_FLAGS]
    add_flags(parser, RouteOptions, "workers")
    add_flags(parser, EngineOptions, without=unused)
    add_flags(parser, SchedulerOptions, without=_TABLE_FLAGS)
    namespace = parser.parse_args(argv)
    namespace.port = getattr(namespace, "port", DEFAULT_PORT)
    routes = from_namespace(RouteOptions, namespace)
    if not routes.combined and not (routes.prefill and routes.decode):
        raise ConfigError("no worker can serve: give --prefill URL and --decode URL, or --combined URL")
    engine = from_namespace(EngineOptions, namespace)
    return routes, engine, from_namespace(SchedulerOptions, namespace, dict(os.environ))


def make_callbacks(routes: RouteOptions) -> Callbacks:
    """Return where decode workers call back; nothing listens before one is asked to. Raises ConfigError."""
    why = NOT_SERVED.get(routes.connector)
    if why is not None:
        raise ConfigError(f"--connector {routes.connector}: {why}")
    if PATHS[routes.connector] != DECODE_FIRST:
        if routes.worker_callback is not None:
            raise ConfigError(f"--worker-callback: with --connector {routes.connector} no worker calls back")
        return Callbacks()
    text = routes.worker_callback or "127.0.0.1:0"
    found = urlsplit(f"//{text}")
    try:
        host, port = found.hostname or "", found.port
    except ValueError:
        port = None
    if port is None or found.netloc != text:
        raise ConfigError(f"--worker-callback {text} is not HOST:PORT, such as 10.0.0.1:9100")
    problem = host_problem(host)
    if problem is not None:
        raise ConfigError(f"--worker-callback {text}: {problem}")
    hosts = HostComparer()
    for url in routes.decode if canonical(host) == "localhost" else ():
        if not hosts.same(urlsplit(url).hostname or "", host):
            raise ConfigError(
                f"--decode {url} is on another host and cannot call back to {host}: set --worker-callback HOST:PORT to "
                "an address of this host that it reaches"
            )
    require_free(host, port, "--worker-callback")
    return Callbacks(host, port)


def _expected(routes: RouteOptions) -> Iterator[ExpectedInstance]:
    seen: dict[str, str] = {}
    index = 0
    for role in (Role.PREFILL, Role.DECODE, Role.COMBINED):
        for number, given in enumerate(getattr(routes, role.value)):
            name, url = f"{role.value}-{number}", _checked_url(given, f"--{role.value}")
            if url in seen:
                raise ConfigError(f"--{role.value} {given} is {seen[url]} already: each worker is named once")
            seen[url] = name
            yield ExpectedInstance(index, name, role, url, "", ())
            index += 1


def _checked_url(text: str, flag_name: str) -> str:
    """Return the URL as scheme, host and port. Raises ConfigError."""
    try:
        found = urlsplit(text)
        port = found.port
    except ValueError as error:
        raise ConfigError(f"{flag_name} {text}: {error}") from None
    if found.scheme not in ("http", "https") or not found.hostname:
        raise ConfigError(f"{flag_name} {text} is not a URL such as http://10.0.0.1:8100")
    if found.username is not None:
        raise ConfigError(f"{flag_name}: the URL of {found.hostname} has a user: give a key by --worker-api-key-file")
    if found.path.strip("/") or found.query or found.fragment:
        raise ConfigError(f"{flag_name} {text}: give scheme, host and port only")
    host = f"[{found.hostname}]" if ":" in found.hostname else found.hostname
    return f"{found.scheme}://{host}:{port or (443 if found.scheme == 'https' else 80)}"


def _key(path: str | None) -> str:
    if path is None:
        return ""
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--worker-api-key-file {path}: {getattr(error, 'strerror', None) or error}") from error


def _with_model_of(engine: EngineOptions, expected: Sequence[ExpectedInstance], key: str) -> EngineOptions:
    """Return the options with what the workers serve, where no flag says otherwise. Raises ConfigError."""
    try:
        found: ServedModel = asyncio.run(find_served_model([one.address for one in expected], key))
    except Unavailable as error:
        if engine.model:
            return engine
        raise ConfigError(f"no worker answers, so the model is not known: {error}; or give --model") from None
    longest = engine.max_model_len
    if longest is not None and 0 < found.max_model_len < longest:
        raise ConfigError(f"--max-model-len {longest} is more than the workers' {found.max_model_len}")
    return dataclasses.replace(
        engine,
        model=engine.model or found.root,
        served_model_name=engine.served_model_name or found.names,
        max_model_len=longest or found.max_model_len or None,
    )
