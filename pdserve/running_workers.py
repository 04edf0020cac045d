"""Running vLLM workers, given by URL: their ranktable entries, and the model that they serve."""

import asyncio
import dataclasses
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flags.options import EngineOptions
from ranktable_tools.launch_plan import GLOBAL_VARIABLE, LOCAL_VARIABLE
from ranktable_tools.secret import SECRET_NAME, ensure_secret
from ranktable_tools.table_file import write_global, write_local
from ranktable_tools.tables import GlobalTable, LocalTable, TableServer, WorkerKind
from ranktable_tools.worker_urls import url_place, worker_url
from scheduler.config import SchedulerOptions
from scheduler.worker_access import read_worker_key
from scheduler.workers.served_model import find_served_model
from wire.errors import ConfigError, Unavailable

_HOST = "127.0.0.1"
_GLOBAL, _LOCAL = "global_ranktable.json", "local_ranktable_host.json"


@dataclass(frozen=True, slots=True)
class RunningWorkers:
    """The entries of workers by the groups of a ranktable; a combined worker is in both groups."""

    prefill: tuple[TableServer, ...] = ()
    decode: tuple[TableServer, ...] = ()

    @property
    def urls(self) -> tuple[str, ...]:
        """The URL of each worker once."""
        return tuple(dict.fromkeys(one.url for one in (*self.prefill, *self.decode) if one.url is not None))

    def can_serve(self, urls: Collection[str]) -> bool:
        """Whether the workers at these URLs can prefill and decode."""
        return all(any(one.url in urls for one in group) for group in (self.prefill, self.decode))


NO_WORKERS = RunningWorkers()


def running_workers(
    prefill: Sequence[str], decode: Sequence[str], combined: Sequence[str], connector: str, flags: str = "--{}"
) -> RunningWorkers:
    """Return the workers at these URLs; `flags` is the format of a flag in messages.

    Raises ConfigError for one that is not a URL or is given twice.
    """
    kind: WorkerKind = "vllm-ascend" if connector.startswith("ascend") else "vllm"
    name_by_url: dict[str, str] = {}
    found: dict[str, list[TableServer]] = {}
    for role, given in {"prefill": prefill, "decode": decode, "combined": combined}.items():
        for number, text in enumerate(given):
            shown = f"{flags.format(role)} {text.rpartition('@')[2]}"  # without a user and its password
            try:
                url = worker_url(text)
            except ValueError as error:
                raise ConfigError(f"{shown} {error}") from None
            if url in name_by_url:
                raise ConfigError(f"{shown} is already {name_by_url[url]}: name each worker only once")
            name_by_url[url] = f"{role}-{number}"
            host = url_place(url)[0]
            found.setdefault(role, []).append(TableServer(host, host, worker=kind, url=url))
    both = found.get("combined", ())
    return RunningWorkers((*found.get("prefill", ()), *both), (*found.get("decode", ()), *both))


def write_tables(workers: RunningWorkers, port: int, tables: Path) -> dict[str, str]:
    """Write the ranktable of a scheduler and its workers into `tables`; return the variables that name its files."""
    scheduler = TableServer(_HOST, _HOST, server_port=port or None)
    tables.mkdir(mode=0o700, parents=True, exist_ok=True)
    global_path, local_path = tables / _GLOBAL, tables / _LOCAL
    write_global(global_path, GlobalTable(scheduler, workers.prefill, workers.decode))
    write_local(local_path, LocalTable(scheduler))
    ensure_secret(tables)
    return {GLOBAL_VARIABLE: str(global_path), LOCAL_VARIABLE: str(local_path)}


def remove_tables(tables: Path) -> None:
    """Delete what `write_tables` wrote, and the folder unless it has other files."""
    for name in (_GLOBAL, _LOCAL, SECRET_NAME):
        (tables / name).unlink(missing_ok=True)
    with suppress(OSError):
        tables.rmdir()


def with_model_of(workers: RunningWorkers, engine: EngineOptions, options: SchedulerOptions) -> EngineOptions:
    """Return the options, with the workers' values for flags that were not given. Raises ConfigError."""
    try:
        found = asyncio.run(find_served_model(workers.urls, read_worker_key(options), workers.can_serve))
    except Unavailable as error:
        if engine.model:
            return engine
        raise ConfigError(
            f"no worker answers, so the model is not known: set --model, or start a worker ({error})"
        ) from None
    longest = engine.max_model_len
    if longest is not None and 0 < found.max_model_len < longest:
        raise ConfigError(f"--max-model-len {longest} is more than the workers' {found.max_model_len}")
    return dataclasses.replace(
        engine,
        model=engine.model or found.root,
        served_model_name=engine.served_model_name or found.names,
        max_model_len=longest or found.max_model_len or None,
    )
