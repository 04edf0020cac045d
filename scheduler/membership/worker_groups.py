"""Which workers of other engines fit together, before the first of them is accepted. Pure.

Workers of one engine version and model are a group. The worker that answers first may be the one that does not fit, so
no worker is accepted before its group can serve.
"""

from collections.abc import Collection

from scheduler.membership.compatibility import ExpectedInstance, check_workers
from wire.description import InstanceDescription
from wire.errors import Unavailable
from wire.types import Role

_Group = tuple[str, str, int]


class WorkerGroups:
    """Owner of what each worker reported last.

    A group can serve with a combined worker, or with one worker of each role; roles in `may_lack` are not needed.
    `models` are the names of the scheduler's model: once a worker reports one of them, no group of another model can
    serve.
    """

    def __init__(self, models: Collection[str], may_lack: Collection[Role]) -> None:
        self._models = frozenset(models)
        self._may_lack = frozenset(may_lack)
        self._reported: dict[int, tuple[Role, InstanceDescription]] = {}

    def note(self, expected: ExpectedInstance, description: InstanceDescription) -> None:
        """Record what a worker reports."""
        self._reported[expected.index] = expected.role, description

    def forget(self, index: int) -> None:
        """Drop the report of a worker that left."""
        self._reported.pop(index, None)

    def has_reported(self, index: int) -> bool:
        """Whether this worker's version and model are known."""
        return index in self._reported

    def can_serve(self, unknown: Collection[Role]) -> bool:
        """Whether some group can serve if the members of `unknown` roles, which have not reported, belong to it."""
        return self._completes({*unknown}) or len(self._complete(unknown)) > 0

    def check_first(self, index: int, unknown: Collection[Role]) -> None:
        """Check a worker that has reported, while none is accepted.

        Raises Incompatible if it does not fit the workers that can serve, or if no group can; Unavailable if undecided.
        """
        described = self._reported[index][1]
        own, complete = _group_of(described), self._complete(())
        if own in complete:
            return
        if complete or not self.can_serve(unknown):
            for _, (_, other) in sorted(self._reported.items()):
                if _group_of(other) != own and (not complete or _group_of(other) in complete):
                    check_workers(other, described)
        raise Unavailable("no other worker of its version and model with which it could serve has answered yet")

    def _complete(self, unknown: Collection[Role]) -> set[_Group]:
        """Return the groups that can serve if the members of `unknown` roles belong to them."""
        roles: dict[_Group, set[Role]] = {}
        for role, described in self._reported.values():
            roles.setdefault(_group_of(described), {*unknown}).add(role)
        known = self._models & {model for _, model, _ in roles}
        return {group for group in roles if self._completes(roles[group]) and (not known or group[1] in known)}

    def _completes(self, roles: set[Role]) -> bool:
        return Role.COMBINED in roles or (bool(roles) and roles | self._may_lack >= {Role.PREFILL, Role.DECODE})


def _group_of(described: InstanceDescription) -> _Group:
    return described.engine, described.model.name, described.max_model_len
