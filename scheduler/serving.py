"""A running scheduler, with or without a socket: the HTTP API, the control plane and their tasks."""

import asyncio
import contextlib
import dataclasses
import random
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from images.checkpoint import VisionCheckpoint
from ranktable_tools.addresses import HostComparer
from remote_files.addresses import AddressRules
from scheduler.app import build_app
from scheduler.app_context import AppContext, ReadyReport, always_healthy
from scheduler.config import SchedulerConfig, SchedulerOptions
from scheduler.control import Control
from scheduler.http.drain import Drain
from scheduler.http.keys import read_keys
from scheduler.images.header_reader import HeaderReader
from scheduler.images.image_limits import ImageBudget
from scheduler.images.image_loader import ImageLoader
from scheduler.images.image_source import ImageSources
from scheduler.limits import ControlLimits
from scheduler.membership.compatibility import ExpectedInstance
from scheduler.membership.member import Connect, MemberState
from scheduler.memory import give_back_memory
from scheduler.model.files import read_model_files
from scheduler.model.generation_defaults import read_defaults
from scheduler.model.kind import ModelKind
from scheduler.observability.metrics import Metrics
from scheduler.observability.replacements import VARIABLE as STATE_FILE
from scheduler.observability.traces import open_traces
from scheduler.placement import max_output
from scheduler.registry import Registry
from scheduler.request_claims import RequestClaims
from scheduler.responses_store.background_runs import BackgroundRuns
from scheduler.responses_store.response_store import ResponseStore
from scheduler.responses_store.sqlite_rows import StoreLimits
from scheduler.responses_store.sqlite_store import SqliteStore
from scheduler.tokens import Tokens
from telemetry.logs import EventLogger
from wire.errors import ConfigError, InvalidRequest, Overloaded, Unavailable

_log = EventLogger("scheduler")
Task = Callable[[], Coroutine[Any, Any, None]]

READY_POLL_S = 0.05
LOG_EVERY_S = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class Cluster:
    """The instances of the table and how to connect to them. `health` returns why the scheduler cannot work.

    `follow` updates the registry when the table changes, until cancelled.
    """

    expected: tuple[ExpectedInstance, ...]
    connect: Connect
    table_digest: str = ""
    health: Callable[[], str | None] = always_healthy
    follow: Callable[[Registry], Coroutine[Any, Any, None]] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Serving:
    """A scheduler whose `app` answers while `run` runs; `drain` counts running requests."""

    app: ASGIApp
    control: Control
    drain: Drain
    _background: BackgroundRuns
    _tasks: tuple[Task, ...]

    async def run(self) -> None:
        """Keep the sessions with the instances, until cancelled.

        Raises ConfigError if no path has answered within --startup-timeout, Incompatible for an incompatible instance.
        """
        tasks = [asyncio.create_task(start()) for start in self._tasks]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            await self._background.close()  # before the sessions close, whose loss would fail the responses
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def open_serving(
    config: SchedulerConfig, cluster: Cluster, environ: Mapping[str, str], *, limits: ControlLimits | None = None,
) -> AsyncIterator[Serving]:  # fmt: skip
    """Create a scheduler for `cluster`; on exit, running requests are ended. Raises ConfigError.

    The options for queue and retries override `limits`.
    """
    options = config.options
    keys = read_keys(options, environ)
    defaults = read_defaults(config.engine.model, options.generation_config, options.override_generation_config)
    files = read_model_files(
        config.engine.model, config.engine.max_model_len, options.chat_template, options.hf_overrides
    )
    if options.tool_call_parser is None and files.call_format is not None:
        _log.info("tool_call_parser_chosen", parser=files.call_format, by="chat template")
    limits = limits_of(options, limits or ControlLimits(), num_tenants=max(1, len(keys)))
    names = {config.engine.model, *config.engine.served_names()}
    control = build_control(cluster, limits, files.kind, names)
    model = config.engine.served_names()[0]
    traces = open_traces(options.otlp_traces_endpoint, environ, model=model)
    metrics = Metrics(
        control.view, model_name=model, max_model_len=files.max_model_len,
        exporter=None if traces is None else traces.exporter,
        state_file=Path(environ[STATE_FILE]) if environ.get(STATE_FILE) else None,
    )  # fmt: skip
    context = AppContext(
        config,
        control.dispatch,
        Tokens(files, options.chat_settings(keyed=len(keys) > 0)),
        metrics,
        readiness=lambda: report(control),
        health=cluster.health,
        max_output=lambda num_tokens, n: max_output(control.registry.loads(), num_tokens, n),
        drain=Drain(),
        traces=traces,
        keys=keys,
        defaults=defaults,
        images=open_images(options, model, files.vision, lambda: _has_workers(control.registry)),
        responses=await _open_responses(options),
        streams=control.dispatch if options.orphan_limit else None,
        claims=RequestClaims(control.registry, limits, control.dispatch.ledger),
    )
    tasks = _tasks_of(cluster, control, context)
    try:
        yield Serving(build_app(context), control, context.drain, context.background, tasks)
    finally:
        await control.dispatch.close(0)
        await _close(context)


def limits_of(options: SchedulerOptions, limits: ControlLimits, num_tenants: int) -> ControlLimits:
    """Return `limits` with the options: those with the name of a limit as they are, the others translated."""
    names = {field.name for field in dataclasses.fields(options)} & {field.name for field in dataclasses.fields(limits)}
    return dataclasses.replace(
        limits,
        **{name: getattr(options, name) for name in names},
        num_tenants=num_tenants,
        may_lack=options.may_lack(),
        compare_paths=options.path == "auto",
        follow_load=options.roles == "auto",
        ttft_limit_s=options.ttft_limit or 0.0,
        orphan_s=options.orphan_limit,
    )


def _tasks_of(cluster: Cluster, control: Control, context: AppContext) -> tuple[Task, ...]:
    follow = cluster.follow
    return (
        control.run,
        *(() if follow is None else (lambda: follow(control.registry),)),
        lambda: _watch_startup(control, context.config.options.startup_timeout),
        lambda: _start_templates(context.tokens),
        lambda: give_back_memory(lambda: not control.dispatch.ledger.inflight),
    )


async def _close(context: AppContext) -> None:
    for owner in (context.responses, context.tokens, context.images):
        if owner is not None:
            await owner.close()
    if context.traces is not None:
        await asyncio.to_thread(context.traces.close)


def _has_workers(registry: Registry) -> bool:
    return any(member.expected.is_worker for member in registry.members)


def open_images(
    options: SchedulerOptions, model: str, vision: VisionCheckpoint | None,
    has_workers: Callable[[], bool] = lambda: False,
) -> ImageLoader:  # fmt: skip
    """Return the loader of images in chats; without `vision`, it serves only workers of other engines."""
    folder = options.allowed_local_media_path
    sources = ImageSources(
        AddressRules.of(options.allow_private_urls), options.allowed_media_domains,
        None if folder is None else Path(folder), options.image_fetch_timeout,
    )  # fmt: skip
    budget = ImageBudget(options.max_image_bytes)
    return ImageLoader(
        model, vision, options.limit_mm_per_prompt, sources, budget, HeaderReader(), options.enable_mm_embeds,
        has_workers,
    )  # fmt: skip


async def _open_responses(options: SchedulerOptions) -> ResponseStore | None:
    if options.responses_store is None:
        return None
    limits = StoreLimits(options.responses_store_count, options.responses_store_bytes, options.responses_store_ttl)
    return await SqliteStore.open(Path(options.responses_store), limits)


def build_control(
    cluster: Cluster, limits: ControlLimits, kind: ModelKind = ModelKind.TEXT, models: Collection[str] = ()
) -> Control:
    """Return the control plane for `cluster`, with an id unique to this process; `models` are its model's names."""
    scheduler_id = f"scheduler-{secrets.token_hex(4)}"
    registry = Registry(
        cluster.expected,
        cluster.connect,
        table_digest=cluster.table_digest,
        scheduler_id=scheduler_id,
        epoch=1,
        limits=limits,
        rng=random.Random(secrets.randbits(64)),  # noqa: S311 - spreads reconnects, guards nothing
        same_host=HostComparer().same,
        models=models,
    )
    return Control(registry, limits, id_prefix=scheduler_id, kind=kind)


def report(control: Control) -> ReadyReport:
    """Return whether a request would be served now, and what is missing."""
    view = control.view()
    suspects = [f"{i.name} at {i.address} (suspect: {i.why})" for i in view.instances if i.state == MemberState.SUSPECT]
    missing = [*map(str, control.registry.missing()), *suspects, *map(str, control.registry.gaps())]
    if not view.ready and not missing:
        missing = ["a request or probe that succeeds on a path: none has in the last 10 s"]
    instances = [
        {
            "instance": i.instance_id,
            "name": i.name,
            "role": i.role.value,
            "address": i.address,
            "state": i.state,
            "why": i.why,
        }
        for i in view.instances
    ]
    return ReadyReport(view.ready, tuple(missing), {"roles_gone": view.when_gone, "instances": instances})


async def _watch_startup(control: Control, timeout_s: float) -> None:
    """Log what is missing while waiting; raise ConfigError if no path was ready within `timeout_s`."""
    loop = asyncio.get_running_loop()
    began, logged = loop.time(), loop.time()
    while not control.ready():
        await asyncio.sleep(READY_POLL_S)
        now = loop.time()
        if now - began > timeout_s:
            raise ConfigError(f"not ready after --startup-timeout {timeout_s:g} s; missing: {_missing_text(control)}")
        if now - logged > LOG_EVERY_S:
            logged = now
            _log.info("waiting", missing=_missing_text(control))
    _log.info("ready", seconds=loop.time() - began)


async def _start_templates(tokens: Tokens) -> None:
    """Start the template process while the instances load; if that fails, the first chat tries again.

    Raises ConfigError if --chat-template cannot be compiled.
    """
    try:
        await tokens.start()
    except (Overloaded, Unavailable, InvalidRequest) as error:
        _log.warning("templates_not_started", error=str(error))


def _missing_text(control: Control) -> str:
    return "; ".join(report(control).missing)
