"""The frames that links are in the middle of: while one arrives slowly, nothing else can come over its link."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvtransfer.ticket import ReceiverTicket


@dataclass(slots=True)
class _Arrival:
    """`ticket` is the frame's own, None while nobody wants it; `seen` of the link's bytes had come at the last look."""

    ticket: ReceiverTicket | None
    seen: int


class Arrivals:
    """Owner of each link's count of bytes and of the frame under way on it. Each link is told of by its own thread."""

    def __init__(self) -> None:
        self._received: dict[int, Callable[[], int]] = {}
        self._under_way: dict[int, _Arrival] = {}

    def meet(self, link: int, received: Callable[[], int]) -> None:
        """`received` tells how many bytes have come over the link's stream."""
        self._received[link] = received

    def lost(self, link: int) -> None:
        """The link is gone."""
        self._under_way.pop(link, None)
        self._received.pop(link, None)

    def begin(self, link: int) -> None:
        """A frame's header came."""
        received = self._received.get(link)
        if received is not None:
            self._under_way[link] = _Arrival(None, received())

    def wanted(self, link: int, ticket: ReceiverTicket) -> None:
        """The frame under way on the link is this ticket's."""
        arrival = self._under_way.get(link)
        if arrival is not None:
            arrival.ticket = ticket

    def end(self, link: int) -> None:
        """The frame is here, or skipped."""
        self._under_way.pop(link, None)

    def moving(self) -> Iterator[tuple[int, ReceiverTicket | None]]:
        """Yield the links on which bytes of a frame came since the last look, and whose the frame is. Any thread."""
        for link, arrival in self._under_way.copy().items():
            received = self._received.get(link)
            count = arrival.seen if received is None else received()
            if count > arrival.seen:
                arrival.seen = count
                yield link, arrival.ticket
