"""Who may reserve next on an instance whose blocks are all used, when several schedulers want them."""

from wire.event_sink import EventSink

TURN_S = 0.5


class Turns:
    """Owner of the line of schedulers whose last reservation was refused for lack of blocks, first come first served.

    Without turns, the scheduler whose prompt ends would hear of the free blocks first, and take them each time. The
    first scheduler in line loses its turn TURN_S after it first held up another one: its prompt may have been placed
    elsewhere. One scheduler alone never waits for a turn.
    """

    def __init__(self) -> None:
        self._line: dict[EventSink, None] = {}
        self._holds_since: float | None = None

    def may_take(self, owner: EventSink, now: float) -> bool:
        """Return whether no other scheduler is first in line; `now` in seconds."""
        while (head := next(iter(self._line), owner)) is not owner:
            if self._holds_since is None:
                self._holds_since = now
            if now - self._holds_since <= TURN_S:
                return False
            self.leave(head)
        return True

    def wait(self, owner: EventSink) -> None:
        """Put a scheduler that was refused into the line; one that is in line already keeps its place."""
        self._line.setdefault(owner)

    def leave(self, owner: EventSink) -> bool:
        """Remove a scheduler that has its blocks, or is gone; return whether others wait."""
        if next(iter(self._line), None) is owner:
            self._holds_since = None
        self._line.pop(owner, None)
        return bool(self._line)
