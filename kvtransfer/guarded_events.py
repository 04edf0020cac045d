"""Guard around the sender's events: an error in the handler for one ticket must not keep other tickets open."""

from collections.abc import Callable

from kvtransfer.interface import SenderEvents, SendStats
from telemetry.logs import EventLogger
from wire.errors import PdserveError

_log = EventLogger("kvtransfer")


class GuardedEvents:
    """Implements interface.SenderEvents over another sink, and logs the exceptions that the sink raises."""

    def __init__(self, events: SenderEvents) -> None:
        self._events = events

    def acked(self, ticket_id: str, stats: SendStats) -> None:
        """The receiver has committed."""
        self._guard(ticket_id, lambda: self._events.acked(ticket_id, stats))

    def failed(self, ticket_id: str, error: PdserveError) -> None:
        """The ticket ended without commit."""
        self._guard(ticket_id, lambda: self._events.failed(ticket_id, error))

    def _guard(self, ticket_id: str, report: Callable[[], None]) -> None:
        try:
            report()
        except Exception as error:  # noqa: BLE001  a defect in the owner must not keep other tickets open
            _log.error("kv_ticket_end_not_handled", error, ticket=ticket_id)
