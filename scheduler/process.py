"""The scheduler process: serve the HTTP API and the control plane on its port until a signal."""

import asyncio
import os
import socket

from native.ticker import start_ticker
from ranktable_tools.launch_plan import LaunchPlan
from rpc.grpc_connection import GrpcConnection
from scheduler.config import SchedulerConfig, SchedulerOptions
from scheduler.http.certificate import Https, read_https
from scheduler.http.listener import listen, take_shared
from scheduler.http.open_files import raise_open_files
from scheduler.http.server import SharedSocket, serve
from scheduler.links.admin_socket import serve_admin_socket, socket_name
from scheduler.loop import run as run_loop
from scheduler.membership.compatibility import is_url
from scheduler.membership.entries import Entries
from scheduler.registry import Registry
from scheduler.serving import Cluster, open_serving
from scheduler.table_watch import TableWatch
from scheduler.worker_access import WorkerAccess
from security.trust import Trust
from telemetry.logs import EventLogger
from wire.connection import Connection

_log = EventLogger("scheduler")


def run(config: SchedulerConfig, plan: LaunchPlan, trust: Trust) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status. Raises ConfigError, Incompatible."""
    trust.warn()
    start_ticker()
    run_loop(serve_cluster(config, cluster_of(plan, trust, config.options)))
    return 0


def cluster_of(plan: LaunchPlan, trust: Trust, options: SchedulerOptions) -> Cluster:
    """Return the cluster described by a ranktable; `trust` authenticates its instances and the scheduler.

    Raises ConfigError if its workers of other engines cannot be reached with `options`.
    """
    expected, workers = Entries(plan).expected, WorkerAccess(options)
    workers.check_reach(expected)

    def connect(address: str) -> Connection:
        return workers.connect(address) if is_url(address) else GrpcConnection(address, trust)

    async def follow(registry: Registry) -> None:
        workers.follow(lambda: registry.members, lambda: registry.leaving)
        try:
            await TableWatch(plan, registry).run()
        finally:
            await workers.close()

    return Cluster(expected, connect, plan.table_digest, follow=follow)


async def serve_cluster(config: SchedulerConfig, cluster: Cluster, stop: asyncio.Event | None = None) -> None:
    """Serve `cluster` on the config's port until a signal or `stop`."""
    https = read_https(config.options)
    raise_open_files()
    with listen(config.engine.host, config.engine.port) as bound:
        await _serve_on(bound, take_shared(os.environ), config, cluster, https, stop or asyncio.Event())


async def _serve_on(
    bound: socket.socket, shared: socket.socket | None, config: SchedulerConfig, cluster: Cluster,
    https: Https | None, stop: asyncio.Event,
) -> None:  # fmt: skip
    async with open_serving(config, cluster, os.environ) as serving:
        listeners = [one for one in (bound, shared) if one is not None]
        ports = ",".join(str(one.getsockname()[1]) for one in listeners)
        _log.info("listening", host=config.engine.host, port=ports, model=config.engine.model)
        names, registry = [socket_name(*one.getsockname()[:2]) for one in listeners], serving.control.registry
        served = serve(
            serving.app, bound, serving.drain, shutdown_timeout_s=config.options.shutdown_timeout, stop=stop,
            https=https, client_timeout_s=config.options.client_timeout,
            shared=None if shared is None else SharedSocket(shared, serving.control.ready),
        )  # fmt: skip
        await _until_first_ends(
            asyncio.create_task(served),
            asyncio.create_task(serving.run()),
            *(asyncio.create_task(serve_admin_socket(name, registry, shared=i > 0)) for i, name in enumerate(names)),
        )


async def _until_first_ends(serving: asyncio.Task[None], *guards: asyncio.Task[None]) -> None:
    """Serve until a signal; if a guard fails, stop serving and raise its error."""
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
