"""The role that an instance has now: the table's at first, then that of the latest accepted SetRole."""

from wire.messages import RoleHeld, SetRole
from wire.types import Role


class HeldRole:
    """Owner of an instance's role and its epoch. Of two changes with the same epoch, the second is refused."""

    def __init__(self, role: Role) -> None:
        self._held = RoleHeld(role, 0)

    @property
    def held(self) -> RoleHeld:
        """The current role and its epoch."""
        return self._held

    def take(self, command: SetRole, obstacle: str = "") -> RoleHeld:
        """Return the answer to a command: the new role, or the current one with the reason, such as `obstacle`."""
        held, answers = self._held, command.epoch
        if command.epoch <= held.epoch:
            obstacle = f"role epoch {command.epoch} is not above {held.epoch}, the epoch of its role {held.role}"
        if obstacle:
            return RoleHeld(held.role, held.epoch, answers, obstacle)
        self._held = RoleHeld(command.role, command.epoch)
        return RoleHeld(command.role, command.epoch, answers)
