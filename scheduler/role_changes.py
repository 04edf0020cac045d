"""Change the role of a running instance: the kind of new work it gets. What runs there stays, and nothing is loaded."""

import asyncio

from scheduler.membership.member import Member
from scheduler.registry import Registry
from wire.errors import DeadlineExceeded, InvalidRequest, Unavailable
from wire.messages import RoleHeld, SetRole
from wire.types import Role

ANSWER_S = 10.0


class RoleRefused(InvalidRequest):
    """The instance itself cannot have this role, whatever the roles of the others."""


async def change_role(registry: Registry, name: str, role: Role) -> tuple[Role, RoleHeld]:
    """Give the instance called `name`, such as `decode-0`, a role; return the one it had and the one it has now.

    Raises InvalidRequest if there is no such instance, it is a worker of another engine, or no path would be left;
    RoleRefused if it cannot have the role, Unavailable if it is not connected, and DeadlineExceeded.
    """
    async with registry.changing_role:
        member = _member(registry, name)
        instance, before = member.instance, member.role
        if instance is None or not member.is_living:
            raise Unavailable(f"{name} is {member.state}: {member.why}")
        if role is before:
            return before, RoleHeld(role, member.role_epoch)
        if not registry.would_have_path(instance.index, role):
            raise InvalidRequest(f"{name} as {role} would leave no path: {_roles(registry)}", "role")
        epoch = member.role_epoch + 1
        with instance.role_answers.expect(str(epoch), f"the role of {name} is being changed") as answer:
            instance.post(SetRole(role, epoch))
            try:
                async with asyncio.timeout(ANSWER_S):
                    held = await answer
            except TimeoutError:
                raise DeadlineExceeded(f"{name} did not answer within {ANSWER_S:g} s") from None
    if held.error:
        kind = RoleRefused if held.epoch < epoch else InvalidRequest
        raise kind(f"{name} stays {held.role}: {held.error}", "role")
    return before, held


def _member(registry: Registry, name: str) -> Member:
    members = {member.expected.name: member for member in registry.members}
    if name not in members:
        raise InvalidRequest(f"no instance is called {name}; the names are {', '.join(members)}", "instance")
    if members[name].expected.is_worker:
        raise InvalidRequest(f"{name} is a worker of another engine, whose role is fixed when it starts", "instance")
    return members[name]


def _roles(registry: Registry) -> str:
    return "the living ones are " + ", ".join(f"{one.name} ({one.role})" for one in registry.living())
