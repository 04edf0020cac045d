"""The sender's events with a guard: an owner that breaks over one ticket's ending costs no other ticket its own."""

from collections.abc import Callable

from kvtransfer.interface import SenderEvents, SendStats
from telemetry.logs import EventLogger
from wire.errors import PdserveError

_log = EventLogger("kvtransfer")


class GuardedEvents:
    """Implements interface.SenderEvents over another; what that raises is logged."""

    def __init__(self, events: SenderEvents) -> None:
        self._events = events

    def acked(self, ticket_id: str, stats: SendStats) -> None:
        """The receiver has committed."""
        self._guard(ticket_id, lambda: self._events.acked(ticket_id, stats))

    def failed(self, ticket_id: str, error: PdserveError) -> None:
        """The ticket ended otherwise."""
        self._guard(ticket_id, lambda: self._events.failed(ticket_id, error))

    def _guard(self, ticket_id: str, tell: Callable[[], None]) -> None:
        try:
            tell()
        except Exception as error:  # noqa: BLE001  a defect of the owner must not keep other tickets from ending
            _log.error("kv_ending_untold", exc=error, ticket=ticket_id)
