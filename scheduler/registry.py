"""The members of the cluster as the table lists them, which of them are living, and their roles."""

import asyncio
import itertools
import operator
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from scheduler.instances import Instance
from scheduler.limits import ControlLimits
from scheduler.load.loads import InstanceLoad
from scheduler.load.obstacles import first_reasons
from scheduler.membership.compatibility import (
    ExpectedInstance,
    SameHost,
    check_pair,
    check_place,
    check_table,
    check_version,
    check_workers,
)
from scheduler.membership.kv_pairs import GapKind, KvGap, KvPairs
from scheduler.membership.member import Connect, Member, MemberState
from scheduler.membership.members import Members
from scheduler.membership.worker_groups import WorkerGroups
from scheduler.membership.worker_ranks import WorkerRanks
from scheduler.view import TableView
from telemetry.logs import EventLogger
from wire.description import InstanceDescription
from wire.errors import DeadlineExceeded, Incompatible, InstanceLost, Unavailable
from wire.messages import OpenSession
from wire.types import Role

_log = EventLogger("registry")

_BACK_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class MissingInstance:
    """An instance of the table that is not living, and why."""

    name: str
    address: str
    why: str

    def __str__(self) -> str:
        return f"{self.name} at {self.address} ({self.why})"


class Registry:
    """Owner of the members of the table in use. An incompatible instance is fatal until `confirm_ready`; later it is
    refused and retried. `living` and all methods about living instances leave out removed members.
    """

    def __init__(
        self,
        expected: Sequence[ExpectedInstance],
        connect: Connect,
        *,
        table_digest: str,
        scheduler_id: str,
        epoch: int,
        limits: ControlLimits,
        rng: random.Random,
        same_host: SameHost = operator.eq,
        models: Collection[str] = (),
    ) -> None:
        """`rng` spreads reconnects and breaks ties of placement.

        `models` are the names of the scheduler's model; workers of other engines may use another name for it.
        """
        self.rng = rng
        self._members = Members(
            expected, lambda entry: Member(entry, self, connect, limits, rng), limits, self._drop_instance
        )
        self._ranks = WorkerRanks(expected)
        self._worker_groups = WorkerGroups(models, limits.may_lack)
        self.table = TableView(digest=table_digest)
        self._digests = {table_digest}
        self._different_since: dict[tuple[int, str], float] = {}
        self._scheduler_id = scheduler_id
        self._epochs = itertools.count(epoch)
        self._limits = limits
        self._same_host = same_host
        self._accepted: dict[int, InstanceDescription] = {}
        self.kv_pairs = KvPairs()
        self.changing_role = asyncio.Lock()  # one change at a time: each is checked against the roles that others left
        self.was_ready = False  # a request or probe has succeeded
        self._path_found = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []
        self._living: list[Instance] | None = None  # until a member changes: each placement needs it

    @property
    def members(self) -> tuple[Member, ...]:
        """The members of the table in use, in its order."""
        return self._members.current

    @property
    def leaving(self) -> tuple[Member, ...]:
        """Removed members that are finishing their work."""
        return self._members.leaving

    async def run(self) -> None:
        """Keep sessions with all members until cancelled. Raises Incompatible before the first `confirm_ready`."""
        await self._members.run()

    def change(self, expected: Sequence[ExpectedInstance], table_digest: str, what: str = "") -> None:
        """Switch to another table: dial new entries, give no new work to removed ones.

        `what` describes the differences, for the log.
        """
        self.table = TableView(self.table.version + 1, table_digest)
        _log.info("table_changed", version=self.table.version, digest=table_digest, what=what)
        self._digests.add(table_digest)
        self._ranks.change(expected)
        self._members.change(self._ranks.members())
        self.changed()

    async def wait_path(self, timeout_s: float) -> None:
        """Wait until living instances form a path. Raises DeadlineExceeded, naming every missing instance."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._path_found.wait()
        except TimeoutError:
            waiting_for = "; ".join(map(str, (*self.missing(), *self.gaps())))
            raise DeadlineExceeded(f"no path after {timeout_s:g} s; still missing: {waiting_for}") from None

    def missing(self) -> list[MissingInstance]:
        """Return the members that are not living, in table order."""
        return [
            MissingInstance(member.expected.name, member.expected.address, member.why)
            for member in self.members
            if not member.is_living
        ]

    def living(self) -> list[Instance]:
        """Return the living instances of the table, in its order; not to be changed by the caller."""
        if self._living is None:
            members = self._members.current
            self._living = [one for member in members if (one := member.instance) is not None and one.is_living]
        return self._living

    def instance(self, index: int) -> Instance:
        """Return a living instance by its table index. Raises InstanceLost."""
        found = self.find(index)
        if found is None:
            raise InstanceLost(f"{self.name(index)} is not connected")
        return found

    def find(self, index: int) -> Instance | None:
        """Return a living instance by its table index, None if there is none."""
        member = self._members.by_index.get(index)
        found = None if member is None else member.instance
        return found if found is not None and found.is_living else None

    async def wait_back(self, index: int, seconds: float) -> Instance | None:
        """Return the instance if it is living; if its session was lost, wait until it is back.

        None if the next attempt to reach it fails, or if it is not back after `seconds`.
        """
        member = self._members.by_index.get(index)
        if member is None:
            return None
        attempt, clock = member.num_attempts, asyncio.get_running_loop().time
        deadline = clock() + seconds
        while (found := self.find(index)) is None and member.failed_attempt <= attempt and not member.leaving:
            if clock() >= deadline:
                return None
            await asyncio.sleep(_BACK_POLL_S)
        return found

    def name(self, index: int) -> str:
        """Return the name of the entry with this index."""
        all_instances = (*self.members, *self.leaving)
        return next((one.expected.name for one in all_instances if one.expected.index == index), f"instance {index}")

    def loads(self) -> list[InstanceLoad]:
        """Return the load of every living instance, for placement."""
        gaps_from = self.kv_pairs.gaps_from
        return [one.placement_load(gaps_from(one.index)) for one in self.living()]

    def slowness(self, indices: Collection[int | None]) -> float:
        """Return the largest slowness of these instances that are living; 1 if none is."""
        found = [self.find(index) for index in indices if index is not None]
        return max((one.slowness for one in found if one is not None), default=1.0)

    def would_have_path(self, index: int, role: Role) -> bool:
        """Whether living instances could serve requests that are handed off if this one had `role`."""
        members = [member for member in self.members if member.is_living]
        roles = {one.expected.index: role if one.expected.index == index else one.role for one in members}
        ends = [end for end, its in roles.items() if its is Role.DECODE]
        return any(
            its is Role.COMBINED or (its is Role.PREFILL and any(self.kv_pairs.may_pair(start, end) for end in ends))
            for start, its in roles.items()
        )

    def has_path(self, *, prefill_only: bool = False) -> bool:
        """Whether living instances can serve a request; one that is `prefill_only` needs no decode instance."""
        living = self.living()
        if prefill_only:
            return any(instance.role is not Role.DECODE for instance in living)
        gap, ends = self.kv_pairs.gap, [one.index for one in living if one.role is Role.DECODE]
        return any(
            (one.role is Role.COMBINED and gap(one.index, one.index) is None)
            or (one.role is Role.PREFILL and any(gap(one.index, end) is None for end in ends))
            for one in living
        )

    def awaits_path(self) -> bool:
        """Whether a path is likely soon: a pair is about to be proven, or members of a new table would complete one."""
        if any(gap.kind is GapKind.UNPROVEN for gap in self._all_gaps()):
            return True
        now = asyncio.get_running_loop().time()
        coming = {member.role for member in self.members if not member.is_living and now < member.awaited_until}
        roles = coming | {instance.role for instance in self.living()}
        return bool(coming) and (Role.COMBINED in roles or roles >= {Role.PREFILL, Role.DECODE})

    def no_path(self) -> Unavailable:
        """Return the client's error when nothing can serve its request: missing instances, KV gaps, or else roles."""
        lost = ", ".join(missing.name for missing in self.missing())
        roles = {instance.role for instance in self.living()}
        absent = " and ".join(f"a {role} instance" for role in (Role.PREFILL, Role.DECODE) if role not in roles)
        missing = "; ".join(filter(None, (lost, first_reasons([str(gap) for gap in self.gaps()])))) or absent
        return Unavailable(f"no path can serve this now; missing: {missing}")

    def gaps(self) -> list[KvGap]:
        """Return the pairs of living instances that should be able to hand off prompts but cannot."""
        return [gap for gap in self._all_gaps() if gap.kind is not GapKind.OTHER_ENGINE]

    def _all_gaps(self) -> list[KvGap]:
        return self.kv_pairs.gaps({instance.index for instance in self.living()})

    def confirm_ready(self) -> None:
        """Record that a request succeeded: from now on incompatible instances are refused while the rest serve."""
        self.was_ready = True

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever a member's state or load changes."""
        self._listeners.append(listener)

    def hello(self) -> OpenSession:
        """Return the first message of a new session."""
        return OpenSession(self._scheduler_id, next(self._epochs), self._limits.lease_s, self._limits.orphan_s)

    def accept(self, expected: ExpectedInstance, description: InstanceDescription) -> None:
        """Check a newly connected instance against the table and the first instance accepted.

        While serving, the first may be its own previous process: running streams must not switch to another model.
        """
        if not expected.is_worker:
            check_version(expected, description)
            check_place(expected, description, self._same_host)
            self._check_table(expected, description)
        else:
            self._worker_groups.note(expected, description)
        reference = self._reference(expected)
        if reference is None and expected.is_worker:
            self._worker_groups.check_first(expected.index, self._unknown_roles())
        elif reference is not None:
            (check_workers if expected.is_worker else check_pair)(reference, description)
        self._accepted[expected.index] = description
        self.kv_pairs.add(expected, description)
        if description.worker is not None and self._ranks.note(expected, description.worker.num_ranks):
            self._members.change(self._ranks.members())
            self._living = None

    def _reference(self, expected: ExpectedInstance) -> InstanceDescription | None:
        """Return the first accepted description to compare with: a worker's for a worker, else an instance's."""
        for index, accepted in sorted(self._accepted.items()):
            if (accepted.worker is not None) == expected.is_worker and (self.was_ready or index != expected.index):
                return accepted
        return None

    def refuse(self, expected: ExpectedInstance, error: Incompatible) -> None:
        """Raise `error` if the scheduler was never ready, else log it.

        Even before that, an incompatible worker of another engine is only logged while other workers can still serve.
        """
        can_serve = expected.is_worker and self._worker_groups.can_serve(self._unknown_roles())
        if not self.was_ready and not can_serve:
            raise error
        _log.warning("instance_refused", error=error)

    def _unknown_roles(self) -> set[Role]:
        """Return the roles of the members that may still fit any worker: not refused, version and model unknown."""
        return {
            member.role
            for member in self.members
            if member.state is not MemberState.REFUSED and not self._worker_groups.has_reported(member.expected.index)
        }

    def changed(self) -> None:
        """Record that a member's state or role changed, and notify the listeners."""
        self._living = None
        if self._limits.may_lack:
            self._assign_roles()
        if not self._path_found.is_set() and self.has_path():
            self._path_found.set()
        self.load_changed()

    def load_changed(self) -> None:
        """Notify the listeners that an instance's load changed."""
        for listener in self._listeners:
            listener()

    def roles_gone(self) -> set[Role]:
        """Return the roles that no living instance has; none while a combined one is living."""
        living = {member.role for member in self.members if member.is_living}
        needed = {member.role for member in self.members} | self._limits.may_lack
        return set() if Role.COMBINED in living else needed - living - {Role.COMBINED}

    def role_changed(self, member: Member) -> None:
        """Give the member new work according to its new role."""
        if member.instance is not None:
            member.instance.role = member.role
        self.kv_pairs.set_role(member.expected.index, member.role)
        self.changed()

    def _assign_roles(self) -> None:
        """While no instance of a role in `may_lack` is living, let the others serve alone; later, hand off again."""
        lost = next(iter(self.roles_gone() & self._limits.may_lack), None)
        for member in self.members:
            if member.instance is not None and member.is_living:
                member.instance.role = member.role if lost is None else Role.COMBINED
                member.instance.serves_without = lost

    def _check_table(self, expected: ExpectedInstance, description: InstanceDescription) -> None:
        """Check the table. At the start a difference is an error after `tables_s`: a new file may still arrive.

        While serving it is ignored: a new table may not have reached each host yet. Raises Unavailable or Incompatible.
        """
        if self.was_ready or description.table_digest in self._digests:
            return
        now = asyncio.get_running_loop().time()
        since = self._different_since.setdefault((expected.index, description.table_digest), now)
        try:
            check_table(expected, description, self.table.digest)
        except Incompatible as error:
            if now - since < self._limits.tables_s:
                raise Unavailable(str(error)) from error
            raise

    def _drop_instance(self, member: Member) -> None:
        """Drop a removed member's description, unless it is the only reference for others."""
        index = member.expected.index
        self.kv_pairs.forget(index)
        self._worker_groups.forget(index)
        if len(self._accepted) > 1:
            self._accepted.pop(index, None)
