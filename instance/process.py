"""One instance as a process: lock the table entry, bind, load, serve gRPC until a signal, clean up."""

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from typing import Any

from devices.liveness import THREAD as TOUCH_THREAD
from instance.build import build_engine, connect_handoff
from instance.config import InstanceConfig
from instance.entry_lock import EntryLock
from instance.grammars import make_grammars
from instance.host import Identity, InstanceHost
from instance.http import build_server
from instance.load_thread import THREAD as LOAD_THREAD
from instance.load_thread import Loaded, call_soon, start_load
from instance.table_watch import EntryWatch
from instance.vision import with_image_encoder
from native.ticker import start_ticker
from ranktable_tools.launch_plan import LaunchPlan
from rpc.grpc_server import GrpcServer
from telemetry.logs import EventLogger
from telemetry.start_marks import LOADED, SESSION, StartMarks
from wire.errors import InstanceLost, PdserveError

_log = EventLogger("instance")

STOP_GRACE_S = 1.0
HEALTH_S = 1.0
SESSION_S = 0.05
GRAMMARS_WARM_S = 5.0
_NATIVE_THREADS = (LOAD_THREAD, "engine", TOUCH_THREAD)


def run(config: InstanceConfig, marks: StartMarks | None = None) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status. Raises ConfigError for what the user must fix.

    `marks` report the progress of the start.
    """
    marks = marks or StartMarks()
    for task in os.listdir("/proc/self/task") if config.cores else ():
        os.sched_setaffinity(int(task), config.cores)
    start_ticker()
    lock = EntryLock(_entry_name(config, config.table_digest), config.server_ip, config.device_ids)
    try:
        asyncio.run(_serve(config, lock, marks))
    except InstanceLost as error:
        _exit_despite_native_threads(error)
        raise
    finally:
        lock.close()
    _exit_despite_native_threads()
    return 0


class _Shutdown:
    """The stop event of the process, with the error if any; set by a signal, or by the loss of a rank or the device."""

    def __init__(self) -> None:
        self._loop, self.stop = asyncio.get_running_loop(), asyncio.Event()
        self.error: PdserveError | None = None

    def lost(self, error: PdserveError) -> None:
        """Stop at once, with this error. Any thread, also after the event loop has closed."""
        self.error = error
        call_soon(self._loop, self.stop.set)


async def _serve(config: InstanceConfig, lock: EntryLock, marks: StartMarks) -> None:
    shutdown = _Shutdown()
    stop = shutdown.stop
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = GrpcServer(config.options.host, config.options.port, config.trust)
    port = await server.start()
    try:
        host = await _prepare(config, server, port, shutdown, marks)
    except BaseException:
        await server.stop(0)
        raise
    if host is None:
        await server.stop(0)
        return
    identity = host.identity
    async with asyncio.TaskGroup() as tasks:
        background = [tasks.create_task(_report_health(host, server)), tasks.create_task(_report_session(host, marks))]
        if config.options.http_port is not None:
            http = build_server(config.options.host, config.options.http_port, load=host.load, healthy=host.healthy)
            background.append(tasks.create_task(http.serve()))
        if config.plan is not None:
            background.append(tasks.create_task(_follow_table(config, config.plan, host, lock, stop)))
        await stop.wait()
        _log.info("stopping", instance=identity.instance_id)
        for task in background:
            task.cancel()
    await server.stop(STOP_GRACE_S if shutdown.error is None else 0)
    await host.stop()
    if shutdown.error is not None:
        raise shutdown.error


async def _prepare(
    config: InstanceConfig, server: GrpcServer, port: int, shutdown: _Shutdown, marks: StartMarks
) -> InstanceHost | None:  # fmt: skip
    """Load the engine, open the KV listeners and serve sessions; return None if a signal arrived before that."""
    began = time.monotonic()
    loaded = await _load_unless_stopped(config, shutdown, marks)
    if loaded is None:
        return None
    marks.set(LOADED)
    engine = loaded.engine
    for note in loaded.notes:
        _log.info("start_note", text=note)
    identity = Identity.new(config, port)
    grammars = make_grammars(config, engine.info)
    if grammars is not None:
        await asyncio.to_thread(grammars.wait_warm, GRAMMARS_WARM_S)
    host = InstanceHost(config, engine, identity, port, time.monotonic, grammars, loaded.images)
    connect_handoff(config, engine, identity, host)
    await server.serve(host)
    _log.info("serving", instance=identity.instance_id, port=port, load_s=time.monotonic() - began)
    return host


async def _follow_table(
    config: InstanceConfig, plan: LaunchPlan, host: InstanceHost, lock: EntryLock, stop: asyncio.Event
) -> None:
    """Stop the process when the table no longer lists it and its work is done."""

    def hold(table_digest: str) -> None:
        lock.hold(_entry_name(config, table_digest))

    await EntryWatch(plan, host, config.trust, hold).run()
    stop.set()


def _entry_name(config: InstanceConfig, table_digest: str) -> str:
    return f"{table_digest}:{config.table_port}"


def _exit_despite_native_threads(error: PdserveError | None = None) -> None:
    """Exit at once if a thread is still in native code: a normal exit could crash in it, or wait forever.

    Such a thread loads, runs a long step or waits for a device. `error` is printed here, as nothing else will print it.
    """
    if any(thread.name in _NATIVE_THREADS for thread in threading.enumerate()):
        if error is not None:
            sys.stderr.write(f"{' '.join(str(error).split())}\n")
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0 if error is None else 1)


async def _report_session(host: InstanceHost, marks: StartMarks) -> None:
    while True:
        await asyncio.sleep(SESSION_S)
        if host.in_session:
            marks.set(SESSION)
            return


async def _report_health(host: InstanceHost, server: GrpcServer) -> None:
    while True:
        await server.set_healthy(host.healthy())
        await asyncio.sleep(HEALTH_S)


async def _load_unless_stopped(
    config: InstanceConfig, shutdown: _Shutdown, marks: StartMarks
) -> Loaded | None:  # fmt: skip
    """Load, and return None if a signal arrived meanwhile.

    Raises the error of the load, or that of a rank lost meanwhile: the load itself may then never return.
    """
    loading = start_load(lambda: with_image_encoder(config, *build_engine(config, shutdown.lost, marks.set)))
    stopped = asyncio.create_task(shutdown.stop.wait())
    waits: set[asyncio.Future[Any]] = {loading, stopped}
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        if shutdown.error is not None:
            raise shutdown.error
        return None
    stopped.cancel()
    return loading.result()
