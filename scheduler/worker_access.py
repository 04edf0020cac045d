"""How the scheduler reaches the workers of other engines: their connector, their key, and where they call back."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ranktable_tools.addresses import HostComparer, canonical
from ranktable_tools.worker_urls import url_place
from scheduler.config import SchedulerOptions
from scheduler.membership.compatibility import ExpectedInstance
from scheduler.membership.member import Member, MemberState
from scheduler.membership.worker_ranks import split_address
from scheduler.workers.connection import WorkerConnection
from scheduler.workers.connectors import MOONCAKE
from scheduler.workers.engine_ids import EngineIds
from wire.errors import ConfigError, Incompatible
from wire.types import Role

if TYPE_CHECKING:
    from scheduler.workers.callbacks import Callbacks


class WorkerAccess:
    """Owner of the listener that decode workers call back."""

    def __init__(self, options: SchedulerOptions) -> None:
        """Raises ConfigError if the key cannot be read."""
        self._connector = options.connector
        self._api_key = read_worker_key(options)
        self._place = options.callback_place()
        self._callbacks = None if self._place is None else _callbacks_at(*self._place)
        self._engine_ids = EngineIds(self._is_listed)
        self._members: Callable[[], Sequence[Member]] = tuple
        self._leaving: Callable[[], Sequence[Member]] = tuple

    def follow(self, members: Callable[[], Sequence[Member]], leaving: Callable[[], Sequence[Member]] = tuple) -> None:
        """Check each worker that connects from now on against the members at that time.

        Members that are `leaving` keep their engine ids.
        """
        self._members, self._leaving = members, leaving

    def check_reach(self, expected: Sequence[ExpectedInstance]) -> None:
        """Raise ConfigError if a worker cannot call back, or decode cannot find a prefill worker's bootstrap server."""
        for one in expected:
            earlier = [other for other in expected if other.index < one.index]
            if (why := self._out_of_reach(one, earlier)) is not None:
                raise ConfigError(why)

    def connect(self, address: str) -> WorkerConnection:
        """Return a connection to one data-parallel rank of a worker."""
        return WorkerConnection(
            address, api_key=self._api_key, connector=self._connector, callbacks=self._callbacks,
            check=partial(self._check, split_address(address)[0]), engine_ids=self._engine_ids,
        )  # fmt: skip

    def _is_listed(self, address: str) -> bool:
        return any(member.expected.address == address for member in (*self._members(), *self._leaving()))

    async def _check(self, url: str) -> None:
        """Raise Incompatible if the worker at this URL fails `check_reach`'s checks against the current members."""
        members = self._members()
        one = next((member.expected for member in members if member.expected.address == url), None)
        if one is None:
            return
        others = [member.expected for member in members if _goes_before(member, one)]
        why = await asyncio.to_thread(self._out_of_reach, one, others)  # which may look up names
        if why is not None:
            raise Incompatible(why)

    def _out_of_reach(self, one: ExpectedInstance, others: Sequence[ExpectedInstance]) -> str | None:
        if not one.is_worker:
            return None
        if self._connector == MOONCAKE:
            return _misses_bootstrap(one, [other for other in others if other.is_worker])
        if self._place is None or one.role is not Role.DECODE or canonical(self._place[0]) != "localhost":
            return None
        if HostComparer().same(url_place(one.address)[0], self._place[0]):
            return None
        return (
            f"{one} is on another host and cannot call back to {self._place[0]}: set --worker-callback HOST:PORT to an "
            "address of this host that the worker can reach"
        )

    async def close(self) -> None:
        """Close the listener."""
        if self._callbacks is not None:
            await self._callbacks.close()


def _callbacks_at(host: str, port: int) -> "Callbacks":
    # imports aiohttp, a tenth of the start time, which only one connector needs
    from scheduler.workers.callbacks import Callbacks

    return Callbacks(host, port)


def _goes_before(member: Member, one: ExpectedInstance) -> bool:
    """Whether `one` is refused rather than the member if the two conflict.

    That is so if the member already serves, or is listed before `one` and is not refused. Data-parallel ranks other
    than a worker's first are not compared.
    """
    index, is_refused = member.expected.index, member.state is MemberState.REFUSED
    is_other = index != one.index and not split_address(member.expected.address)[1]
    return is_other and (member.is_living or (index < one.index and not is_refused))


def _misses_bootstrap(one: ExpectedInstance, others: Sequence[ExpectedInstance]) -> str | None:
    """Return why decode workers would be led to another bootstrap server, or to none, by the prefill workers' URLs."""
    for other in others:
        if one.role is Role.PREFILL is other.role and _host(one) == _host(other):
            return (
                f"{one} and {other} are on one host: with --connector {MOONCAKE} a host can have only one prefill "
                "worker, as bootstrap servers use the same port on every host"
            )
        prefill, decode = (one, other) if one.role is Role.PREFILL else (other, one)
        if (prefill.role, decode.role) != (Role.PREFILL, Role.DECODE) or _host(prefill) != "localhost":
            continue
        if not HostComparer().same(url_place(decode.address)[0], "localhost"):
            return (
                f"{decode}, on another host, cannot find the bootstrap server of {prefill}: list that worker under an "
                "address that other hosts can reach"
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
