"""What became of the tickets that are over, so that a sender's late message is answered with it."""

from collections import OrderedDict

_REMEMBERED = 4_096


class PastTickets:
    """The last so many tickets: committed, or why they ended. Not locked."""

    def __init__(self) -> None:
        self._reasons: OrderedDict[str, str | None] = OrderedDict()

    def committed(self, ticket_id: str) -> None:
        """The ticket's share has been committed."""
        self._add(ticket_id, None)

    def ended(self, ticket_id: str, reason: str) -> None:
        """The ticket's share has ended without."""
        self._add(ticket_id, reason)

    def is_committed(self, ticket_id: str) -> bool:
        """Whether it is remembered as committed."""
        return self._reasons.get(ticket_id, "") is None

    def why_not(self, ticket_id: str, epoch: int) -> str:
        """Say why a message of this ticket finds none."""
        reason = self._reasons.get(ticket_id)
        if reason:
            return f"ticket {ticket_id} is over: {reason}"
        return f"ticket {ticket_id} of epoch {epoch:x} is unknown or over"

    def _add(self, ticket_id: str, reason: str | None) -> None:
        self._reasons[ticket_id] = reason
        if len(self._reasons) > _REMEMBERED:
            self._reasons.popitem(last=False)
