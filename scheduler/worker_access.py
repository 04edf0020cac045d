"""How the scheduler reaches the workers of other engines: their connector, their key, and where they call back."""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ranktable_tools.addresses import HostComparer, canonical
from ranktable_tools.worker_urls import url_place
from scheduler.config import SchedulerOptions
from scheduler.membership.compatibility import ExpectedInstance
from scheduler.membership.worker_ranks import split_address
from scheduler.workers.callbacks import Callbacks
from scheduler.workers.connection import WorkerConnection
from scheduler.workers.connectors import MOONCAKE
from wire.errors import ConfigError, Incompatible
from wire.types import Role


class WorkerAccess:
    """Owner of the listener that decode workers call back."""

    def __init__(self, options: SchedulerOptions) -> None:
        """Raises ConfigError if the key cannot be read."""
        self._connector = options.connector
        self._api_key = read_worker_key(options)
        self._place = options.callback_place()
        self._callbacks = Callbacks(*self._place or ())
        self._expected: tuple[ExpectedInstance, ...] = ()

    def use_table(self, expected: Sequence[ExpectedInstance]) -> None:
        """Judge the workers that are connected from now on by this table."""
        self._expected = tuple(expected)

    def check_reach(self, expected: Sequence[ExpectedInstance]) -> None:
        """Use the first table. Raises ConfigError for a worker that cannot reach the address that it would be given."""
        self.use_table(expected)
        for one in expected:
            if (why := self._out_of_reach(one, expected)) is not None:
                raise ConfigError(why)

    def connect(self, address: str) -> WorkerConnection:
        """Return a connection to one data-parallel rank of a worker."""
        return WorkerConnection(
            address, api_key=self._api_key, connector=self._connector, callbacks=self._callbacks,
            check=partial(self._check, split_address(address)[0]),
        )  # fmt: skip

    async def _check(self, url: str) -> None:
        """Raise Incompatible if the worker at this URL cannot reach the address that it would be given."""
        expected = self._expected  # the table may change during the check, which may look up names
        one = next((one for one in expected if one.address == url), None)
        why = None if one is None else await asyncio.to_thread(self._out_of_reach, one, expected)
        if why is not None:
            raise Incompatible(why)

    def _out_of_reach(self, one: ExpectedInstance, expected: Sequence[ExpectedInstance]) -> str | None:
        if not one.is_worker:
            return None
        if self._connector == MOONCAKE:
            return _misses_bootstrap(one, [other for other in expected if other.is_worker and other.index < one.index])
        if self._place is None or one.role is not Role.DECODE or canonical(self._place[0]) != "localhost":
            return None
        if HostComparer().same(url_place(one.address)[0], self._place[0]):
            return None
        return (
            f"{one} is on another host and cannot call back to {self._place[0]}: set --worker-callback HOST:PORT to an "
            "address of this host that it reaches"
        )

    async def close(self) -> None:
        """Close the listener."""
        await self._callbacks.close()


def _misses_bootstrap(one: ExpectedInstance, earlier: Sequence[ExpectedInstance]) -> str | None:
    """Return why decode workers would be led to another bootstrap server, or to none, by the prefill workers' URLs.

    Of two workers that do not fit, the later one is refused: the earlier may be serving.
    """
    for other in earlier:
        if one.role is Role.PREFILL is other.role and _host(one) == _host(other):
            return (
                f"{one} and {other} are on one host: with --connector {MOONCAKE} a host has one prefill worker, whose "
                "bootstrap server is at the same port on each"
            )
        prefill, decode = (one, other) if one.role is Role.PREFILL else (other, one)
        if (prefill.role, decode.role) != (Role.PREFILL, Role.DECODE) or _host(prefill) != "localhost":
            continue
        if not HostComparer().same(url_place(decode.address)[0], "localhost"):
            return (
                f"{decode}, on another host, cannot find the bootstrap server of {prefill}: give an address of this "
                "host that it reaches"
            )
    return None


def _host(one: ExpectedInstance) -> str:
    return canonical(url_place(one.address)[0])


def read_worker_key(options: SchedulerOptions) -> str:
    """Return the key that workers require, "" for none. Raises ConfigError."""
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
