"""One table entry and its life: dial, check, serve a session, and again, until the registry lets it go."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from enum import StrEnum
from typing import Protocol

from scheduler.instances import Instance, check_progress
from scheduler.limits import ControlLimits
from scheduler.membership.compatibility import ExpectedInstance
from telemetry.capped_logs import CappedLog
from telemetry.logs import EventLogger
from wire.connection import Connection, Session
from wire.errors import DeadlineExceeded, Incompatible, InstanceLost, Loading, PdserveError, Unavailable
from wire.messages import Event, OpenSession, SessionOpen
from wire.types import InstanceDescription, LoadSnapshot

log = EventLogger("registry")

Connect = Callable[[str], Connection]


class MemberState(StrEnum):
    """Where an entry of the table stands.

    `starting`: it answers and loads its model; `suspect`: it is silent, gets no new work and keeps its streams;
    `refused`: it answers and does not belong; `draining`: it is leaving.
    """

    CONNECTING = "connecting"
    STARTING = "starting"
    LIVING = "living"
    SUSPECT = "suspect"
    DRAINING = "draining"
    LOST = "lost"
    REFUSED = "refused"


class Membership(Protocol):
    """What a member needs of the registry."""

    def hello(self) -> OpenSession:
        """Return the opening of a new session, with a new epoch."""
        ...

    def accept(self, expected: ExpectedInstance, description: InstanceDescription) -> None:
        """Check a newcomer. Raises Incompatible."""
        ...

    def refuse(self, error: Incompatible) -> None:
        """Raise `error` where it is fatal, else return."""
        ...

    def changed(self) -> None:
        """A member's state or load is new."""
        ...


class Member:
    """Owns the state of one table entry and, while it lives, its Instance. `role` is the current one.

    Until `awaited_until` of the loop's time it may well be reached in a moment: it was added just now.
    """

    def __init__(
        self, expected: ExpectedInstance, registry: Membership, connect: Connect, limits: ControlLimits,
        rng: random.Random,
    ) -> None:  # fmt: skip
        self.expected = expected
        self.role = expected.role
        self.state = MemberState.CONNECTING
        self.why = "not reached yet"
        self.leaving = False
        self.awaited_until = float("-inf")
        self.description: InstanceDescription | None = None
        self.instance: Instance | None = None
        self._registry = registry
        self._connect = connect
        self._limits = limits
        self._rng = rng
        self._backoff_s = limits.backoff_first_s
        self._young_rest_s, self._rest_s = limits.backoff_first_s, 0.0  # after one more that breaks young, and due now
        self._still = CappedLog(log)

    @property
    def is_living(self) -> bool:
        """Whether it has a session that stands."""
        return self.instance is not None and self.instance.is_living

    def leave(self) -> None:
        """The table has it no more: a session that stands goes on until its owner ends it, no other is opened."""
        self.leaving = True
        if self.is_living:
            self._become(MemberState.DRAINING, "it is gone from the global table, its requests end")

    def stay(self) -> None:
        """The table has it again."""
        self.leaving = False
        if self.is_living:
            self._become(MemberState.LIVING, "")

    async def run(self) -> None:
        """Keep a session with the instance until it leaves. Raises Incompatible where the registry says it is fatal."""
        while not self.leaving:
            try:
                await self._connect_once()
            except Incompatible as error:
                self._become(MemberState.REFUSED, str(error))
                self._registry.refuse(error)
                await asyncio.sleep(self._limits.refused_retry_s)
            except PdserveError as error:
                why = str(error).removeprefix(f"{self.expected.address}: ")  # whose it is, is said beside it
                self._become(self._state_after(error), why)
                if not self.leaving:
                    await asyncio.sleep(self._next_backoff())
            except Exception as error:  # noqa: BLE001 - the task's outermost frame: one entry's defect ends no other
                log.error("member_broke", exc=error, instance=self.expected)
                self._become(MemberState.LOST, f"internal error: {error!r}")
                await asyncio.sleep(self._limits.refused_retry_s)

    def _state_after(self, error: PdserveError) -> MemberState:
        if isinstance(error, Loading):
            return MemberState.STARTING
        return MemberState.LOST if self.description else MemberState.CONNECTING

    async def _connect_once(self) -> None:
        connection = self._connect(self.expected.address)
        try:
            description = await connection.describe(self._limits.describe_s)
            self._registry.accept(self.expected, description)
            session = await self._open(connection)
            events = session.events()
            try:
                load = await self._first_load(events, description)
                await self._live(description, session, events, load)
            finally:
                await self._close(session)
        finally:
            await self._close(connection)

    async def _open(self, connection: Connection) -> Session:
        try:
            return await connection.open(self._registry.hello(), self._limits.open_s)
        except Incompatible as error:  # another scheduler holds it: worth waiting for, unlike a difference
            raise Unavailable(str(error)) from error

    async def _first_load(self, events: AsyncIterator[Event], description: InstanceDescription) -> LoadSnapshot:
        """Return what the session begins with. What was described and accepted is one life of the instance alone."""
        try:
            async with asyncio.timeout(self._limits.open_s):
                first = await anext(events)
        except TimeoutError:
            raise DeadlineExceeded(f"no SessionOpen within {self._limits.open_s:g} s") from None
        except StopAsyncIteration:
            raise InstanceLost("the instance ended the session at once") from None
        if not isinstance(first, SessionOpen):
            raise InstanceLost(f"the session began with {type(first).__name__}, not SessionOpen")
        if (first.instance_id, first.epoch) != (description.instance_id, description.epoch):
            raise InstanceLost("the instance has restarted since it described itself")
        check_progress(first.load, self._limits)
        return first.load

    async def _live(
        self, description: InstanceDescription, session: Session, events: AsyncIterator[Event], load: LoadSnapshot
    ) -> None:
        self.instance = Instance(
            self.expected.index,
            self.expected.name,
            description,
            self.role,
            session,
            load,
            self._limits,
            self._suspicion_changed,
        )
        self.description = description
        self._become(MemberState.LIVING, "")
        began = asyncio.get_running_loop().time()
        try:
            await self.instance.run(events)
        except InstanceLost as error:
            self._become(MemberState.LOST, str(error))
            raise
        finally:
            self._note_life(asyncio.get_running_loop().time() - began)
            self.instance = None

    def _suspicion_changed(self) -> None:
        """Follow the instance, whose state or load is new."""
        instance = self.instance
        if instance is not None and instance.is_living and self.state in (MemberState.LIVING, MemberState.SUSPECT):
            self._become(*((MemberState.SUSPECT, "it is silent") if instance.is_suspect else (MemberState.LIVING, "")))
        else:
            self._registry.changed()

    def _note_life(self, lived_s: float) -> None:
        """After a session that lived, reconnect quickly; after one more that broke young, ever more slowly."""
        limits = self._limits
        if lived_s >= limits.lived_s:
            self._young_rest_s = limits.backoff_first_s
        else:
            self._young_rest_s = min(self._young_rest_s * 1.6, limits.backoff_young_s)
        self._rest_s = self._young_rest_s
        self._backoff_s = limits.backoff_first_s

    def _become(self, state: MemberState, why: str) -> None:
        is_well = state not in (MemberState.SUSPECT, MemberState.LOST, MemberState.REFUSED)
        if state is not self.state:
            report = log.info if is_well else log.warning
            report(f"instance_{state}", instance=self.expected, why=why)
        elif why != self.why:  # whoever answers at the address chooses the words, at every try anew
            again = self._still.info if is_well else self._still.warning
            again(f"instance_{state}", f"{self.expected} is still {state}", instance=self.expected, why=why)
        self.state, self.why = state, why
        self._registry.changed()

    def _next_backoff(self) -> float:
        backoff_s, self._rest_s = max(self._backoff_s, self._rest_s), 0.0
        self._backoff_s = min(self._backoff_s * 1.6, self._limits.backoff_most_s)
        return backoff_s * self._rng.uniform(0.75, 1.25)

    async def _close(self, closing: Session | Connection) -> None:
        try:
            async with asyncio.timeout(self._limits.send_s):
                await closing.close()
        except (TimeoutError, PdserveError) as error:
            log.debug("close_failed", instance=self.expected, error=error)
