"""One combined instance and the scheduler's surface in this process, without a socket: what run-batch and LLM ask."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable

from starlette.types import ASGIApp

from scheduler.config import SchedulerConfig, SchedulerOptions
from scheduler.control import Control
from scheduler.limits import ControlLimits
from scheduler.membership.compatibility import ExpectedInstance
from scheduler.serving import Cluster, Serving, open_serving
from telemetry.logs import EventLogger
from wire.errors import ConfigError, PdserveError
from wire.options import EngineOptions
from wire.types import Role

log = EventLogger("inner_app")

_DEVICE_IDS = ("0",)
_HOST = "127.0.0.1"
_READY_POLL_S = 0.01
LIMITS = ControlLimits(probe_timeout_s=600.0, suspect_s=math.inf, silence_s=math.inf, progress_s=math.inf)
"""Of an engine in this process, which nobody could take over from: a step may take as long as it takes."""


@contextlib.asynccontextmanager
async def inner_app(engine: EngineOptions, scheduler: SchedulerOptions) -> AsyncIterator[ASGIApp]:
    """Load the model and yield the app that serves it; ready when entered. No key is asked for.

    Raises ConfigError, and on leaving what the engine was lost by: the body is then cancelled where it waits.
    """
    config = SchedulerConfig(engine, scheduler)
    async with (
        _ended_by_loss() as end,
        _instance(engine, end) as cluster,
        open_serving(config, cluster, {}, limits=LIMITS) as serving,
        _kept(serving, end),
    ):
        await _until_ready(serving.control)
        yield serving.app


@contextlib.asynccontextmanager
async def _ended_by_loss() -> AsyncIterator[Callable[[BaseException], None]]:
    """Yield what ends the body, from any thread, by the first error it is told: raised on leaving."""
    owner, loop = asyncio.current_task(), asyncio.get_running_loop()
    lost: list[BaseException] = []

    def end(error: BaseException) -> None:
        lost.append(error)
        if len(lost) == 1 and owner is not None and is_open:
            owner.cancel()

    def tell(error: BaseException) -> None:
        loop.call_soon_threadsafe(end, error)

    is_open = True
    try:
        yield tell
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

        told = InstanceConfig(engine, Role.COMBINED, server_ip=_HOST, device_ids=_DEVICE_IDS)
        instance = await LocalInstance.start(told, on_lost)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"a local model needs the engine ({error.name} is missing): pip install 'pdserve[engine]'"
        ) from error
    for note in instance.notes:
        log.info("note", what=note)
    expected = ExpectedInstance(0, "combined-0", Role.COMBINED, "this process", _HOST, _DEVICE_IDS)
    try:
        yield Cluster((expected,), lambda address: instance.connection())
    finally:
        await instance.stop()


@contextlib.asynccontextmanager
async def _kept(serving: Serving, end: Callable[[BaseException], None]) -> AsyncIterator[None]:
    """Run what keeps the scheduler alive beside the body; `end` is told if that fails."""

    def told(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            end(error)

    keeping = asyncio.create_task(serving.run())
    keeping.add_done_callback(told)
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def _until_ready(control: Control) -> None:
    """Wait until a request would be served; serving.run() fails after --startup-timeout."""
    while not control.ready():  # noqa: ASYNC110 - the same look that /ready takes
        await asyncio.sleep(_READY_POLL_S)
