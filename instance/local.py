"""One instance inside this process, as `pdserve serve` uses it: the same host, connected without a socket."""

import asyncio
import time
from collections.abc import Callable

from instance.build import build_engine, connect_handoff
from instance.config import InstanceConfig
from instance.grammars import make_grammars
from instance.host import Identity, InstanceHost
from instance.load_thread import call_soon, fail, start_load
from instance.vision import with_image_encoder
from wire.errors import PdserveError
from wire.inprocess import InProcessConnection


class LocalInstance:
    """A loaded instance that runs on this process's event loop."""

    def __init__(self, host: InstanceHost, notes: tuple[str, ...]) -> None:
        self._host = host
        self.notes = notes

    @classmethod
    async def start(
        cls, config: InstanceConfig, on_lost: Callable[[PdserveError], None] = lambda error: None
    ) -> "LocalInstance":
        """Load the model and start the engine thread. `on_lost`: see build_engine.

        Raises the error of the load, or that of a rank lost meanwhile: the load itself may then never return.
        """
        loop = asyncio.get_running_loop()

        def lost(error: PdserveError) -> None:
            on_lost(error)
            call_soon(loop, lambda: fail(loading, error))

        loading = start_load(lambda: with_image_encoder(config, *build_engine(config, lost)))
        loaded = await loading
        engine = loaded.engine
        identity = Identity.new(config, config.options.port)
        try:
            grammars = make_grammars(config, engine.info)
            host = InstanceHost(config, engine, identity, config.options.port, time.monotonic, grammars, loaded.images)
            connect_handoff(config, engine, identity, host)
        except BaseException:
            await asyncio.to_thread(loaded.close)  # also ends the processes of its ranks
            raise
        return cls(host, loaded.notes)

    def connection(self) -> InProcessConnection:
        """Return an in-process connection to the instance."""
        return InProcessConnection(self._host)

    def healthy(self) -> bool:
        """Return whether the engine thread runs and makes progress at about its recent pace."""
        return self._host.healthy()

    def progress_age(self) -> float:
        """Return the seconds since the engine loop last made progress; infinity if its thread has died."""
        return self._host.loop.progress_age() if self._host.loop.alive() else float("inf")

    async def stop(self) -> None:
        """End all work and threads."""
        await self._host.stop()
