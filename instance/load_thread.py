"""Load an engine in a daemon thread: the process can end even if the load hangs because another rank was lost."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass

from engine.interface import Engine
from engine.vision.image_encoder import ImageEncoder

THREAD = "load"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded engine with notes for the log, and its image encoder if it has one."""

    engine: Engine
    notes: tuple[str, ...] = ()
    images: ImageEncoder | None = None

    def close(self) -> None:
        """Close both."""
        if self.images is not None:
            self.images.close()
        self.engine.close()


def start_load(build: Callable[[], Loaded]) -> asyncio.Future[Loaded]:
    """Run `build` in a thread; return a future of its result or error, which a caller may complete earlier."""
    loop = asyncio.get_running_loop()
    loading: asyncio.Future[Loaded] = loop.create_future()

    def take(loaded: Loaded) -> None:
        if loading.done():  # nobody waits for it any more
            threading.Thread(target=loaded.close, name="close-engine", daemon=True).start()
        else:
            loading.set_result(loaded)

    def load() -> None:
        try:
            loaded = build()
        except Exception as error:  # noqa: BLE001 - passed to the waiting task
            call_soon(loop, fail, loading, error)
        else:
            call_soon(loop, take, loaded)

    threading.Thread(target=load, name=THREAD, daemon=True).start()
    return loading


def fail(loading: asyncio.Future[Loaded], error: Exception) -> None:
    """End a load with an error, unless it has ended. On its event loop."""
    if not loading.done():
        loading.set_exception(error)


def call_soon(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: object) -> None:
    """Schedule a call on the event loop, from any thread; do nothing once the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *args)
