"""A prefill and a decode instance on fake models, in this process: real engines, threads, KV links."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from flags.options import EngineOptions
from instance.config import InstanceConfig
from instance.local import LocalInstance
from wire.connection import Session
from wire.errors import PdserveError
from wire.messages import Event, OpenSession
from wire.types import Role

FAKE = {"vocab_size": 500, "max_model_len": 256, "num_layers": 3}
DEADLINE_S = 300.0


def instance_config(folder: Path, role: Role, *, port: int, **options: object) -> InstanceConfig:
    """Return the config of a fake instance whose port doubles as its device id."""
    (folder / "fake.json").write_text(json.dumps(FAKE))
    engine = EngineOptions(model=str(folder), engine="fake", port=port, **options)  # type: ignore[arg-type]
    return InstanceConfig(engine, role, device_ids=(str(port),))


class Client:
    """A session as a test drives it: sends commands, reads events with a deadline."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._events = session.events()

    async def next(self, *kinds: type) -> Event:
        """Return the next event of one of these types, skipping others."""
        async with asyncio.timeout(DEADLINE_S):
            async for event in self._events:
                if isinstance(event, kinds):
                    return event
        raise AssertionError("the session ended")


@contextlib.asynccontextmanager
async def running(
    config: InstanceConfig,
    on_lost: Callable[[PdserveError], None] = lambda error: None,
    *,
    lease_s: float = 10 * DEADLINE_S,
) -> AsyncIterator[tuple[LocalInstance, Client]]:
    """Start an instance and open a session to it with this lease. `on_lost` is called for a lost rank."""
    instance = await LocalInstance.start(config, on_lost)
    try:
        session = await instance.connection().open(OpenSession("test", 1, lease_s), DEADLINE_S)
        yield instance, Client(session)
        await session.close()
    finally:
        await instance.stop()
