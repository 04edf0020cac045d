"""`pdserve route`: one scheduler in front of running vLLM workers."""

import argparse
import dataclasses
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from flags.options import EngineOptions, add_flags, flag, from_namespace
from pdserve import role_process
from pdserve.flags.parser import CommandParser
from pdserve.model_flags import with_plain_model
from pdserve.ports import require_free
from pdserve.run_folder import RunFolder, default_run_dir
from pdserve.running_workers import RunningWorkers, remove_tables, running_workers, with_model_of, write_tables
from pdserve.start_lines import say
from pdserve.up import Interrupts, require_none
from ranktable_tools.launch_plan import resolve
from scheduler.config import DEFAULT_PORT, SchedulerConfig, SchedulerOptions
from wire.errors import ConfigError

EPILOG = """\
examples:
  pdserve route --prefill http://10.0.0.1:8100 --decode http://10.0.0.2:8200
  pdserve route --prefill http://10.0.0.1:8100 http://10.0.0.3:8100 --decode http://10.0.0.2:8200 --port 9000
  pdserve route --combined http://10.0.0.1:8000 http://10.0.0.2:8000

The workers must be running; they are neither started, changed nor stopped. docs/route.md says how to start them.
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
    run_dir: str | None = flag(None, "folder of the table of workers (default: route/PORT in pdserve up's folder)")


def main(argv: Sequence[str]) -> int:
    """Serve until SIGTERM or Ctrl-C. Raises ConfigError for wrong input."""
    routes, engine, options = parse(argv)
    require_free(engine.host, engine.port)
    workers = running_workers(routes.prefill, routes.decode, routes.combined, options.connector)
    options.callback_place()  # reports a wrong flag before the workers are contacted
    engine = with_plain_model(with_model_of(workers, engine, options), os.environ, weights=False)
    folder = _folder(routes, engine.port)
    is_kept = bool(routes.run_dir or engine.port)  # else the folder is for this run alone
    require_none(folder)
    interrupts = Interrupts()
    interrupts.take()  # until the scheduler's loop does
    try:
        with folder.lock(), _tables(workers, engine.port, folder, is_kept) as tables:
            plan = resolve(tables | {"USE_OPENAI": options.use_openai})
            say((f"workers: {plan.global_path} (edit this table to add, drain or move them)",))
            return role_process.serve_scheduler(SchedulerConfig(engine, options), plan)
    except KeyboardInterrupt:
        return interrupts.status
    finally:
        interrupts.ignore()


@contextmanager
def _tables(workers: RunningWorkers, port: int, folder: RunFolder, is_kept: bool) -> Iterator[dict[str, str]]:
    """Write the tables, and delete them at the end, with the folder unless it is kept."""
    try:
        yield write_tables(workers, port, folder.tables)
    finally:
        remove_tables(folder.tables)
        if not is_kept:
            shutil.rmtree(folder.path, ignore_errors=True)


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


def _folder(routes: RouteOptions, port: int) -> RunFolder:
    if routes.run_dir is not None:
        return RunFolder(Path(routes.run_dir).absolute())
    return RunFolder(Path(default_run_dir(os.environ)).absolute() / "route" / str(port or f"any-{os.getpid()}"))
