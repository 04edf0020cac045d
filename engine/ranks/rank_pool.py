"""The pool of a rank on its own device: rank 0's process knows its layout and accesses it by messages."""

from typing import NoReturn

from engine.ranks.message_kinds import RankMessageKind
from engine.ranks.team import Team
from wire.errors import PdserveError
from wire.kv_layout import PoolLayout


class RankPool:
    """Implements devices.interface.Memory as far as rank 0's process can: the rank's own process moves its KV."""

    fd = None

    def __init__(self, team: Team, layout: PoolLayout) -> None:
        """`layout` is that of the rank's part, with which it made its pool."""
        self._team, self.layout = team, layout

    @property
    def buffer(self) -> NoReturn:
        """Raises TypeError: it is in another process, on a device."""
        raise TypeError(f"the KV pool of {self.layout.rank} is on a device of another process")

    def hand_over(self, settings: bytes, fd: int) -> None:
        """Let the rank send and receive its own KV, as requested on the socket `fd`; call it before the first step.

        Only the caller and the rank's program interpret `settings`. Raises InstanceLost.
        """
        self._team.send(self.layout.rank.number, RankMessageKind.HAND_OFF, settings, (fd,))

    def explain(self, what: str) -> PdserveError:
        """Return why the rank no longer answers; it is lost in any case: see Team.explain."""
        return self._team.explain(what)

    def close(self) -> None:
        """Do nothing: the memory is freed when the rank's process ends."""
