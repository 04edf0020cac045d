"""One table entry's life cycle: dial, check, serve a session, and repeat until the registry removes it."""

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
from wire.description import InstanceDescription
from wire.errors import DeadlineExceeded, Incompatible, InstanceLost, Loading, PdserveError, Unavailable
from wire.load import LoadSnapshot
from wire.messages import Event, OpenSession, RoleHeld, SessionOpen, SetRole

_log = EventLogger("registry")

Connect = Callable[[str], Connection]


class MemberState(StrEnum):
    """The state of a table entry.

    `starting`: reachable and loading its model; `suspect`: silent, gets no new work but keeps its streams; `refused`:
    reachable but incompatible; `draining`: leaving the cluster.
    """

    CONNECTING = "connecting"
    STARTING = "starting"
    LIVING = "living"
    SUSPECT = "suspect"
    DRAINING = "draining"
    LOST = "lost"
    REFUSED = "refused"


class Membership(Protocol):
    """The registry's interface to a member."""

    def hello(self) -> OpenSession:
        """Return the first message of a new session, with a new epoch."""
        ...

    def accept(self, expected: ExpectedInstance, description: InstanceDescription) -> None:
        """Check a newly connected instance. Raises Incompatible."""
        ...

    def refuse(self, expected: ExpectedInstance, error: Incompatible) -> None:
        """Raise `error` if it is fatal, else return."""
        ...

    def changed(self) -> None:
        """Record that a member's state changed: also that its instance is living, or no longer."""
        ...

    def load_changed(self) -> None:
        """Record that the load of a member's instance changed."""
        ...

    def role_changed(self, member: "Member") -> None:
        """Record that a member has another role now."""
        ...


class Member:
    """Owner of the state of one table entry and, while it is connected, its Instance. `role` is the current one, and
    `role_epoch` its epoch on the instance; -1 before that is known.

    Until `awaited_until`, in loop time, it is expected to become reachable soon: it was just added.
    """

    def __init__(
        self, expected: ExpectedInstance, registry: Membership, connect: Connect, limits: ControlLimits,
        rng: random.Random,
    ) -> None:  # fmt: skip
        self.expected = expected
        self.role, self.role_epoch = expected.role, -1
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
        self._young_rest_s, self._rest_s = limits.backoff_first_s, 0.0  # rest after a short session; rest due now
        self._refused_s = min(limits.refused_first_s, limits.refused_retry_s)
        self.num_attempts = self.failed_attempt = 0  # attempts to have a session; the last that failed or ended
        self._still = CappedLog(_log)

    @property
    def is_living(self) -> bool:
        """Whether it has an open session."""
        return self.instance is not None and self.instance.is_living

    def leave(self) -> None:
        """Leave the table: an open session continues until its owner ends it, and no other is opened."""
        self.leaving = True
        if self.is_living:
            self._set_state(MemberState.DRAINING, "removed from the global table; finishing its requests")

    def stay(self) -> None:
        """Return to the table."""
        self.leaving = False
        if self.is_living:
            self._set_state(MemberState.LIVING, "")
            self._suspicion_changed()

    async def run(self) -> None:
        """Keep a session with the instance until it leaves. Raises Incompatible if the registry considers it fatal."""
        while not self.leaving:
            self.num_attempts += 1
            try:
                await self._connect_once()
            except Incompatible as error:
                self.failed_attempt = self.num_attempts
                self._set_state(MemberState.REFUSED, str(error))
                self._registry.refuse(self.expected, error)
                await asyncio.sleep(self._refused_s)
                self._refused_s = min(2 * self._refused_s, self._limits.refused_retry_s)
            except PdserveError as error:
                self.failed_attempt = self.num_attempts
                why = str(error).removeprefix(f"{self.expected.address}: ")  # the log line names the address
                self._set_state(self._state_after(error), why)
                if not self.leaving:
                    await asyncio.sleep(self._next_backoff())
            except Exception as error:  # noqa: BLE001 - the task's outermost frame: a bug in one must not end others
                _log.error("member_task_failed", error, instance=self.expected)
                self._set_state(MemberState.LOST, f"internal error: {error!r}")
                await asyncio.sleep(self._limits.refused_retry_s)

    def _state_after(self, error: PdserveError) -> MemberState:
        is_late = isinstance(error, DeadlineExceeded)  # a process that loads may be too busy to answer in time
        if isinstance(error, Loading) or (is_late and self.state is MemberState.STARTING):
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
                change = None if self.expected.is_worker else self._begin_role(await self._first_role(events))
                await self._run_session(description, session, events, load, change)
            finally:
                await self._close(session)
        finally:
            await self._close(connection)

    async def _open(self, connection: Connection) -> Session:
        try:
            return await connection.open(self._registry.hello(), self._limits.open_s)
        except Incompatible as error:  # another scheduler's session may end: wait for that
            raise Unavailable(str(error)) from error

    async def _first_load(self, events: AsyncIterator[Event], description: InstanceDescription) -> LoadSnapshot:
        """Return the load of SessionOpen. Raises InstanceLost if the instance is not the process that was described."""
        first = await self._next(events, SessionOpen)
        if not isinstance(first, SessionOpen):
            raise InstanceLost(f"the session began with {type(first).__name__}, not SessionOpen")
        if (first.instance_id, first.epoch) != (description.instance_id, description.epoch):
            raise InstanceLost("the instance has restarted since it described itself")
        check_progress(first.load, self._limits)
        return first.load

    async def _first_role(self, events: AsyncIterator[Event]) -> RoleHeld:
        held = await self._next(events, RoleHeld)
        if not isinstance(held, RoleHeld):
            raise InstanceLost(f"{type(held).__name__} follows SessionOpen, not RoleHeld")
        return held

    async def _next(self, events: AsyncIterator[Event], wanted: type[Event]) -> Event:
        try:
            async with asyncio.timeout(self._limits.open_s):
                return await anext(events)
        except TimeoutError:
            raise DeadlineExceeded(f"no {wanted.__name__} within {self._limits.open_s:g} s") from None
        except StopAsyncIteration:
            raise InstanceLost("the instance ended the session at once") from None

    async def _run_session(
        self, description: InstanceDescription, session: Session, events: AsyncIterator[Event], load: LoadSnapshot,
        change: SetRole | None,
    ) -> None:  # fmt: skip
        self.instance = Instance(
            self.expected.index,
            self.expected.name,
            description,
            self.role,
            session,
            load,
            self._limits,
            self._registry.load_changed,
            self._suspicion_changed,
            self._take_role,
        )
        if change is not None:
            self.instance.post(change)
        self.description = description
        self._refused_s = min(self._limits.refused_first_s, self._limits.refused_retry_s)
        self._set_state(MemberState.LIVING, "")
        began = asyncio.get_running_loop().time()
        try:
            await self.instance.run(events)
        except InstanceLost as error:
            self._set_state(MemberState.LOST, str(error))
            raise
        finally:
            self._note_life(asyncio.get_running_loop().time() - began)
            self.instance = None

    def _begin_role(self, held: RoleHeld) -> SetRole | None:
        """Adopt the role that an instance has at the start of a session, or return the command that gives it ours.

        The instance's role counts if it was changed since, or if we never set one; a restarted process has the table's.
        """
        if held.role is self.role or held.epoch > self.role_epoch:
            self._take_role(held)
            return None
        self.role_epoch = held.epoch + 1
        return SetRole(self.role, self.role_epoch)

    def _take_role(self, held: RoleHeld) -> None:
        is_other, self.role, self.role_epoch = held.role is not self.role, held.role, held.epoch
        if is_other:
            _log.info("role_changed", instance=self.expected, role=self.role, epoch=self.role_epoch)
            self._registry.role_changed(self)

    def _suspicion_changed(self) -> None:
        """Update the state when the instance becomes suspect, recovers, or is lost."""
        instance = self.instance
        if instance is not None and instance.is_living and self.state in (MemberState.LIVING, MemberState.SUSPECT):
            self._set_state(
                *((MemberState.SUSPECT, "it is silent") if instance.is_suspect else (MemberState.LIVING, ""))
            )
        else:
            self._registry.changed()

    def _note_life(self, lived_s: float) -> None:
        """After a long enough session, reconnect quickly; after another short one, ever more slowly."""
        limits = self._limits
        if lived_s >= limits.lived_s:
            self._young_rest_s = limits.backoff_first_s
        else:
            self._young_rest_s = min(self._young_rest_s * 1.6, limits.backoff_young_s)
        self._rest_s = self._young_rest_s
        self._backoff_s = limits.backoff_first_s

    def _set_state(self, state: MemberState, why: str) -> None:
        is_well = state not in (MemberState.SUSPECT, MemberState.LOST, MemberState.REFUSED)
        if state is not self.state:
            report = _log.info if is_well else _log.warning
            report(f"instance_{state}", instance=self.expected, why=why)
        elif why != self.why:  # the peer chooses this text, and may change it at every attempt
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
            _log.debug("close_failed", instance=self.expected, error=error)
