"""One combined instance and the scheduler's app in this process, without a socket: for run-batch and LLM."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable

from starlette.types import ASGIApp

from flags.options import EngineOptions
from scheduler.config import SchedulerConfig, SchedulerOptions
from scheduler.control import Control
from scheduler.limits import ControlLimits
from scheduler.membership.compatibility import ExpectedInstance
from scheduler.serving import Cluster, Serving, open_serving
from telemetry.logs import EventLogger
from wire.errors import ConfigError, PdserveError
from wire.types import Role

_log = EventLogger("inner_app")

_DEVICE_IDS = ("0",)
_HOST = "127.0.0.1"
_READY_POLL_S = 0.01
LIMITS = ControlLimits(probe_timeout_s=600.0, suspect_s=math.inf, silence_s=math.inf, progress_s=math.inf)
"""Limits for an engine in this process: no other engine could take over, so a step may take any time."""


@contextlib.asynccontextmanager
async def inner_app(engine: EngineOptions, scheduler: SchedulerOptions) -> AsyncIterator[ASGIApp]:
    """Load the model and yield the app that serves it; ready when entered. No API key is required.

    Raises ConfigError; when the engine fails, the body is cancelled and the engine's error raised on exit.
    """
    config = SchedulerConfig(engine, scheduler)
    async with (
        _cancelled_on_loss() as end,
        _instance(engine, end) as cluster,
        open_serving(config, cluster, {}, limits=LIMITS) as serving,
        _run_in_background(serving, end),
    ):
        await _until_ready(serving.control)
        yield serving.app


@contextlib.asynccontextmanager
async def _cancelled_on_loss() -> AsyncIterator[Callable[[BaseException], None]]:
    """Yield a function, callable from any thread, that cancels the body; its first error is raised on exit."""
    owner, loop = asyncio.current_task(), asyncio.get_running_loop()
    lost: list[BaseException] = []

    def end(error: BaseException) -> None:
        lost.append(error)
        if len(lost) == 1 and owner is not None and is_open:
            owner.cancel()

    def end_threadsafe(error: BaseException) -> None:
        loop.call_soon_threadsafe(end, error)

    is_open = True
    try:
        yield end_threadsafe
    except asyncio.CancelledError:
        if not lost:
            raise
        if owner is not None:
            owner.uncancel()
        raise lost[0] from None
    finally:
        is_open = False


@contextlib.asynccontextmanager
async def _instance(engine: EngineOptions, on_lost: Callable[[PdserveError], None]) -> AsyncIterator[Cluster]:
    try:
        from instance.config import InstanceConfig
        from instance.local import LocalInstance

        config = InstanceConfig(engine, Role.COMBINED, server_ip=_HOST, device_ids=_DEVICE_IDS)
        instance = await LocalInstance.start(config, on_lost)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"a local model needs the engine ({error.name} is missing): pip install 'pdserve[engine]'"
        ) from error
    for note in instance.notes:
        _log.info("start_note", text=note)
    expected = ExpectedInstance(0, "combined-0", Role.COMBINED, "this process", _HOST, _DEVICE_IDS)
    try:
        yield Cluster((expected,), lambda address: instance.connection())
    finally:
        await instance.stop()


@contextlib.asynccontextmanager
async def _run_in_background(serving: Serving, end: Callable[[BaseException], None]) -> AsyncIterator[None]:
    """Run the scheduler's background work beside the body; pass its failure to `end`."""

    def on_done(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            end(error)

    running = asyncio.create_task(serving.run())
    running.add_done_callback(on_done)
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def _until_ready(control: Control) -> None:
    """Wait until a request would be served; serving.run() fails after --startup-timeout."""
    while not control.ready():  # noqa: ASYNC110 - the same check as /ready
        await asyncio.sleep(_READY_POLL_S)
