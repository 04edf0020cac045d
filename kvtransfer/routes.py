"""Which links each open ticket goes over, and who may report its ending."""

import threading

from kvtransfer.link import Link


class Routes:
    """Owner of the tickets that have not ended. Whoever takes one out reports its ending: nobody else can."""

    def __init__(self) -> None:
        self._links: dict[str, tuple[Link, ...]] = {}
        self._lock = threading.Lock()

    def open(self, ticket_id: str) -> bool:
        """Make a ticket known before any link hears of it, so that one which ends at once can claim it."""
        with self._lock:
            if ticket_id in self._links:
                return False
            self._links[ticket_id] = ()
            return True

    def add(self, ticket_id: str, link: Link) -> bool:
        """The ticket goes over `link` too; False for one that has ended meanwhile."""
        with self._lock:
            if ticket_id not in self._links:
                return False
            self._links[ticket_id] += (link,)
            return True

    def links(self, ticket_id: str) -> tuple[Link, ...]:
        """The links of a ticket; none for one that has ended."""
        return self._links.get(ticket_id, ())

    def claim(self, ticket_id: str) -> bool:
        """Take the ticket out: True exactly once, the right to report its ending."""
        return self.take(ticket_id) is not None

    def take(self, ticket_id: str) -> tuple[Link, ...] | None:
        """Take the ticket out and return its links, whose load it is no more; None for one that has ended."""
        with self._lock:
            links = self._links.pop(ticket_id, None)
        for link in links or ():
            link.ended(ticket_id)
        return links

    def clear(self) -> None:
        """End all tickets without a report."""
        with self._lock:
            self._links.clear()
