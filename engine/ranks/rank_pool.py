"""The pool of a rank that holds it on its own device: rank 0's process knows its layout and reaches it by messages."""

from typing import NoReturn

from engine.ranks.channel import RankMessageKind
from engine.ranks.team import Team
from wire.errors import PdserveError
from wire.kv_layout import PoolLayout


class RankPool:
    """Implements devices.interface.Memory as far as rank 0's process can: its KV is moved in the rank's own process."""

    fd = None

    def __init__(self, team: Team, layout: PoolLayout) -> None:
        """`layout` is the rank's part, which it has made its pool by."""
        self._team, self.layout = team, layout

    @property
    def buffer(self) -> NoReturn:
        """Raises TypeError: it lies in another process, on a device."""
        raise TypeError(f"the KV pool of {self.layout.rank} lies on a device of its own process")

    def hand_over(self, settings: bytes, fd: int) -> None:
        """Let the rank send and receive its own KV, told by messages on the socket `fd`; before the first step.

        What the settings say is between who calls and the rank's program. Raises InstanceLost.
        """
        self._team.tell(self.layout.rank.number, RankMessageKind.HAND_OFF, settings, (fd,))

    def explain(self, what: str) -> PdserveError:
        """Return why the rank does not answer any more; it is lost in any case: see Team.explain."""
        return self._team.explain(what)

    def close(self) -> None:
        """The memory goes with the rank's process."""
