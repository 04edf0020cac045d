"""How past tickets ended, for answers to a sender's late messages."""

from collections import OrderedDict

_REMEMBERED = 4_096


class PastTickets:
    """The most recent tickets: committed, or why they ended. Not thread-safe."""

    def __init__(self) -> None:
        self._reasons: OrderedDict[str, str | None] = OrderedDict()

    def committed(self, ticket_id: str) -> None:
        """Record a committed ticket."""
        self._add(ticket_id, None)

    def ended(self, ticket_id: str, reason: str) -> None:
        """Record a ticket that ended without commit."""
        self._add(ticket_id, reason)

    def is_committed(self, ticket_id: str) -> bool:
        """Return whether the ticket is remembered as committed."""
        return self._reasons.get(ticket_id, "") is None

    def why_not(self, ticket_id: str, epoch: int) -> str:
        """Return why there is no such ticket, as the reply to a message about it."""
        reason = self._reasons.get(ticket_id)
        if reason:
            return f"ticket {ticket_id} has ended: {reason}"
        return f"ticket {ticket_id} of epoch {epoch:x} is unknown or has ended"

    def _add(self, ticket_id: str, reason: str | None) -> None:
        self._reasons[ticket_id] = reason
        if len(self._reasons) > _REMEMBERED:
            self._reasons.popitem(last=False)
