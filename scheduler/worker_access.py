"""How the scheduler reaches the workers of other engines: their connector, their key, and where they call back."""

from collections.abc import Iterable
from pathlib import Path

from ranktable_tools.addresses import HostComparer, canonical
from ranktable_tools.worker_urls import url_place
from scheduler.config import SchedulerOptions
from scheduler.membership.compatibility import ExpectedInstance
from scheduler.workers.callbacks import Callbacks
from scheduler.workers.connection import WorkerConnection
from wire.errors import ConfigError
from wire.types import Role


class WorkerAccess:
    """Owner of the listener that decode workers call back."""

    def __init__(self, options: SchedulerOptions) -> None:
        """Raises ConfigError if the key cannot be read."""
        self._connector = options.connector
        self._api_key = read_worker_key(options)
        self._place = options.callback_place()
        self._callbacks = Callbacks(*self._place or ())

    def connect(self, address: str) -> WorkerConnection:
        """Return a connection to one data-parallel rank of a worker."""
        return WorkerConnection(address, api_key=self._api_key, connector=self._connector, callbacks=self._callbacks)

    def check_reach(self, expected: Iterable[ExpectedInstance]) -> None:
        """Raise ConfigError for a decode worker on another host that would have to call back to loopback."""
        if self._place is None or canonical(self._place[0]) != "localhost":
            return
        hosts = HostComparer()
        for one in expected:
            if one.is_worker and one.role is Role.DECODE and not hosts.same(url_place(one.address)[0], self._place[0]):
                raise ConfigError(
                    f"{one} is on another host and cannot call back to {self._place[0]}: set --worker-callback "
                    "HOST:PORT to an address of this host that it reaches"
                )

    async def close(self) -> None:
        """Close the listener."""
        await self._callbacks.close()


def read_worker_key(options: SchedulerOptions) -> str:
    """Return the key that workers want, "" for none. Raises ConfigError."""
    path = options.worker_api_key_file
    if path is None:
        return ""
    try:
        key = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--worker-api-key-file {path}: {getattr(error, 'strerror', None) or error}") from error
    if not key:
        raise ConfigError(f"--worker-api-key-file {path}: it is empty")
    return key
