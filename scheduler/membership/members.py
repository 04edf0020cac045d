"""The members and their tasks: those of the table in use, and removed ones that are finishing their work."""

import asyncio
import sys
from collections.abc import Callable, Sequence

from scheduler.limits import ControlLimits
from scheduler.membership.compatibility import ExpectedInstance
from scheduler.membership.member import Member
from telemetry.logs import EventLogger
from wire.errors import InternalError, PdserveError

_log = EventLogger("registry")


class Members:
    """Owner of the members. A removed member keeps its session until its last prompt has ended.

    `change` starts a task for each new member, once no leaving member uses its address, and drains each removed member.
    After the drain, the member's session is closed and its task ended, unless the member is back in the table by then.
    """

    def __init__(
        self, expected: Sequence[ExpectedInstance], make: Callable[[ExpectedInstance], Member], limits: ControlLimits,
        forget: Callable[[Member], None],
    ) -> None:  # fmt: skip
        self._make = make
        self._limits = limits
        self._forget = forget
        self.current = tuple(map(make, expected))
        self.by_index = {member.expected.index: member for member in self.current}
        self.leaving: tuple[Member, ...] = ()
        self._group: asyncio.TaskGroup | None = None
        self._tasks: dict[Member, asyncio.Task[None]] = {}
        self._drains: dict[Member, asyncio.Task[None]] = {}
        self._closing: set[Member] = set()

    async def run(self) -> None:
        """Keep sessions with all members until cancelled. Raises a member's fatal error."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                for member in self.current:
                    self._start(member)
                await asyncio.Event().wait()  # forever: all members may leave before others join
        except BaseExceptionGroup as error:
            raise _first_error(error) from error
        finally:
            self._group = None

    def change(self, expected: Sequence[ExpectedInstance]) -> None:
        """Replace the members with these, in this order; entries with the same index are the same member."""
        before = {member.expected.index: member for member in (*self.leaving, *self.current)}
        after = [self._find_unchanged(before.get(entry.index)) or self._add_member(entry) for entry in expected]
        gone = [member for member in self.current if member not in after]
        self.leaving = (*(member for member in self.leaving if member not in after), *gone)
        self.current = tuple(after)
        self.by_index = {member.expected.index: member for member in after}
        for member in gone:
            self._let_go(member)

    def _find_unchanged(self, member: Member | None) -> Member | None:
        """Return the member if it can stay: not if its session is already being closed."""
        if member is None or not member.leaving:
            return member
        if member in self._closing or self._tasks[member].done():
            return None
        self._drains.pop(member).cancel()
        member.stay()
        _log.info("instance_kept", instance=member.expected, reason="back in the global table")
        return member

    def _add_member(self, entry: ExpectedInstance) -> Member:
        member = self._make(entry)
        member.role_epoch = sys.maxsize  # it begins with the table's role, whatever its process had before
        _log.info("instance_added", instance=entry)
        if self._group is not None:
            member.awaited_until = asyncio.get_running_loop().time() + self._limits.join_s
            self._start(member)
        return member

    def _start(self, member: Member) -> None:
        assert self._group is not None, "`run` is running"
        self._tasks[member] = self._group.create_task(self._run_after_leaving(member))

    async def _run_after_leaving(self, member: Member) -> None:
        """Wait until no leaving member uses this address, then run: an instance accepts one session at a time."""
        while others := [self._drains[one] for one in self.leaving if _same_address(one, member)]:
            await asyncio.wait(others)
        await member.run()

    def _let_go(self, member: Member) -> None:
        member.leave()
        if self._group is None:
            self.leaving = tuple(one for one in self.leaving if one is not member)
            return
        self._drains[member] = self._group.create_task(self._drain_member(member))

    async def _drain_member(self, member: Member) -> None:
        task = self._tasks[member]
        began = asyncio.get_running_loop().time()
        _log.info("instance_draining", instance=member.expected, reason="removed from the global table")
        instance = member.instance
        left = 0 if instance is None else await instance.wait_idle(self._limits.drain_s)
        spent_s = asyncio.get_running_loop().time() - began
        self._closing.add(member)  # too late to stay
        task.cancel()
        await asyncio.wait({task})
        self._end(member)
        if left:
            _log.warning("instance_drained", instance=member.expected, drained_s=spent_s, moved_prompts=left)
        else:
            _log.info("instance_drained", instance=member.expected, drained_s=spent_s)

    def _end(self, member: Member) -> None:
        self.leaving = tuple(one for one in self.leaving if one is not member)
        self._closing.discard(member)
        del self._tasks[member], self._drains[member]
        self._forget(member)


def _same_address(one: Member, other: Member) -> bool:
    return one.expected.address == other.expected.address


def _first_error(group: BaseExceptionGroup[BaseException]) -> PdserveError:
    for error in group.exceptions:
        if isinstance(error, PdserveError):
            return error
    return InternalError(f"the registry broke: {group.exceptions[0]!r}")
