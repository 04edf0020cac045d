"""The scheduler as a process: build the front over the control half, wait for the instances, serve until a signal."""

import asyncio
import dataclasses
import functools
import os
import random
import secrets
from collections.abc import Callable, Coroutine
from typing import Any

from ranktable_tools.addresses import HostComparer
from ranktable_tools.launch_plan import LaunchPlan
from scheduler.api.keys import read_keys
from scheduler.app import build_app
from scheduler.compatibility import ExpectedInstance
from scheduler.config import SchedulerConfig
from scheduler.control import Control
from scheduler.door import door_name, keep_door
from scheduler.drain import Drain
from scheduler.entries import Entries
from scheduler.front import Front, ReadyReport, always_healthy
from scheduler.generation_defaults import read_defaults
from scheduler.https import read_https
from scheduler.limits import ControlLimits
from scheduler.link_probe import LinkProbe
from scheduler.loop import run as run_loop
from scheduler.member import Connect
from scheduler.memory import give_back_memory
from scheduler.metrics import Metrics
from scheduler.model_files import read_model_files
from scheduler.model_kind import ModelKind
from scheduler.open_files import raise_open_files
from scheduler.placement import most_output
from scheduler.registry import Registry
from scheduler.server import listen, serve
from scheduler.table_watch import TableWatch
from scheduler.tokens import Tokens
from scheduler.traces import open_traces
from telemetry.logs import EventLogger
from wire.errors import ConfigError, InvalidRequest, Overloaded, Unavailable
from wire.grpc_connection import GrpcConnection
from wire.trust import Trust

log = EventLogger("scheduler")

READY_POLL_S = 0.05
SAY_EVERY_S = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class Cluster:
    """Whom a scheduler serves with: the table's instances and how to reach them. `health` says why it cannot work.

    `follow` keeps the registry with a table that changes, for ever.
    """

    expected: tuple[ExpectedInstance, ...]
    connect: Connect
    table_digest: str = ""
    health: Callable[[], str | None] = always_healthy
    follow: Callable[[Registry], Coroutine[Any, Any, None]] | None = None


def run(config: SchedulerConfig, plan: LaunchPlan, trust: Trust) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status. Raises ConfigError, Incompatible."""
    trust.warn()
    run_loop(serve_cluster(config, cluster_of(plan, trust)))
    return 0


def cluster_of(plan: LaunchPlan, trust: Trust) -> Cluster:
    """Return the cluster that a ranktable describes; `trust` is what its instances and we prove to each other."""
    return Cluster(
        Entries(plan).expected,
        functools.partial(GrpcConnection, trust=trust),
        plan.table_digest,
        follow=lambda registry: TableWatch(plan, registry).run(),
    )


def build_control(cluster: Cluster, limits: ControlLimits, kind: ModelKind = ModelKind.TEXT) -> Control:
    """Return the control half over `cluster`, with an id no other process has."""
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
    )
    return Control(registry, limits, id_prefix=scheduler_id, kind=kind)


async def serve_cluster(config: SchedulerConfig, cluster: Cluster, stop: asyncio.Event | None = None) -> None:
    """Serve `cluster` on the config's port until a signal or `stop`."""
    options, stop = config.options, stop or asyncio.Event()
    keys, https = read_keys(options, os.environ), read_https(options)
    raise_open_files()
    bound = listen(config.engine.host, config.engine.port)
    files = read_model_files(config.engine.model, config.engine.max_model_len, options.chat_template)
    limits = ControlLimits(
        max_queued_requests=options.max_queued_requests,
        max_queued_tokens=options.max_queued_tokens,
        num_tenants=max(1, len(keys)),
        retry_share=options.retry_share,
        min_retries=options.min_retries,
    )
    control = build_control(cluster, limits, files.kind)
    model = config.engine.served_names()[0]
    traces = open_traces(options.otlp_traces_endpoint, os.environ, model=model)
    drain, tokens = Drain(), Tokens(files, options.chat_settings())
    front = Front(
        config,
        control.dispatch,
        tokens,
        Metrics(
            control.view,
            model_name=model,
            max_model_len=files.max_model_len,
            exporter=None if traces is None else traces.exporter,
        ),
        readiness=lambda: report(control),
        health=cluster.health,
        most_output=lambda num_tokens, n: most_output(control.registry.loads(), num_tokens, n),
        drain=drain,
        traces=traces,
        keys=keys,
        defaults=read_defaults(config.engine.model, options.generation_config, options.override_generation_config),
    )
    log.info("listening", host=config.engine.host, port=bound.getsockname()[1], model=config.engine.model)
    serving = serve(
        build_app(front), bound, drain, shutdown_timeout_s=options.shutdown_timeout, stop=stop, https=https,
        client_timeout_s=options.client_timeout,
    )  # fmt: skip
    try:
        await _until_first_ends(
            asyncio.create_task(serving),
            asyncio.create_task(control.run()),
            *(() if cluster.follow is None else (asyncio.create_task(cluster.follow(control.registry)),)),
            asyncio.create_task(_watch_startup(control, options.startup_timeout)),
            asyncio.create_task(_start_templates(tokens)),
            asyncio.create_task(give_back_memory(lambda: not control.dispatch.ledger.inflight)),
            asyncio.create_task(keep_door(door_name(*bound.getsockname()[:2]), LinkProbe(control.registry))),
        )
    finally:
        await control.dispatch.close(0)
        await tokens.close()
        if traces is not None:
            await asyncio.to_thread(traces.close)


def report(control: Control) -> ReadyReport:
    """Return whether a request would be served now, and what is missing."""
    view = control.view()
    missing = [*map(str, control.registry.missing()), *map(str, control.registry.gaps())]
    if not view.ready and not missing:
        missing = ["a request or probe that crosses a path: none has in the last 10 s"]
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
    return ReadyReport(view.ready, tuple(missing), {"instances": instances})


async def _until_first_ends(serving: asyncio.Task[None], *guards: asyncio.Task[None]) -> None:
    """Serve until a signal ends it; a guard that fails ends it too, and its error is raised."""
    waiting: set[asyncio.Task[None]] = {serving, *guards}
    while serving in waiting:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if any(task.exception() is not None for task in done):
            break
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    for task in (serving, *guards):
        if task.done() and not task.cancelled():
            task.result()


async def _watch_startup(control: Control, timeout_s: float) -> None:
    """Say what is missing while it is; raise ConfigError if no path ever answered within `timeout_s`."""
    loop = asyncio.get_running_loop()
    began, said = loop.time(), loop.time()
    while not control.ready():
        await asyncio.sleep(READY_POLL_S)
        now = loop.time()
        if now - began > timeout_s:
            raise ConfigError(f"not ready after --startup-timeout {timeout_s:g} s; missing: {_missing(control)}")
        if now - said > SAY_EVERY_S:
            said = now
            log.info("waiting", missing=_missing(control))
    log.info("ready", seconds=loop.time() - began)


async def _start_templates(tokens: Tokens) -> None:
    """Start the template process while the instances load; where that fails, the first chat tries again.

    Raises ConfigError if --chat-template cannot be compiled.
    """
    try:
        await tokens.start()
    except (Overloaded, Unavailable, InvalidRequest) as error:
        log.warning("templates_not_started", reason=str(error))


def _missing(control: Control) -> str:
    return "; ".join(report(control).missing)
