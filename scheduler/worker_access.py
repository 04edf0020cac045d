"""How the scheduler reaches the workers of other engines: their connector, their key, and where they call back."""

from collections.abc import Sequence
from pathlib import Path

from ranktable_tools.addresses import HostComparer, canonical
from ranktable_tools.worker_urls import url_place
from scheduler.config import SchedulerOptions
from scheduler.membership.compatibility import ExpectedInstance
from scheduler.workers.callbacks import Callbacks
from scheduler.workers.connection import WorkerConnection
from scheduler.workers.connectors import MOONCAKE
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

    def check_reach(self, expected: Sequence[ExpectedInstance]) -> None:
        """Raise ConfigError for a decode worker that cannot reach the address which it would be given."""
        if self._connector == MOONCAKE:
            _check_bootstrap([one for one in expected if one.is_worker])
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


def _check_bootstrap(workers: Sequence[ExpectedInstance]) -> None:
    """Raise ConfigError unless each prefill worker's host, as the URL has it, leads decode to its bootstrap server."""
    prefill_by_host: dict[str, ExpectedInstance] = {}
    for one in workers:
        if one.role is Role.PREFILL:
            other = prefill_by_host.setdefault(canonical(url_place(one.address)[0]), one)
            if other is not one:
                raise ConfigError(
                    f"{one} and {other} are on one host: with --connector {MOONCAKE} a host has one prefill worker, "
                    "whose bootstrap server is at the same port on each"
                )
    near, hosts = prefill_by_host.get("localhost"), HostComparer()
    if near is None:
        return
    for one in workers:
        if one.role is Role.DECODE and not hosts.same(url_place(one.address)[0], "localhost"):
            raise ConfigError(
                f"{one}, on another host, cannot find the bootstrap server of {near}: give an address of this host "
                "that it reaches"
            )


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
