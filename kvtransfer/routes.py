"""The links of each open ticket, one for each rank of D that it is sent to, and the right to report its end."""

import threading
from dataclasses import dataclass, field

from kvtransfer.interface import SendStats
from kvtransfer.link import Link
from kvtransfer.totals import merge_stats


@dataclass(slots=True)
class _Route:
    """The number of links that the ticket needs, its links so far, and the statistics of the acked ones."""

    num_links: int
    links: tuple[Link, ...] = ()
    acked: list[SendStats] = field(default_factory=list)


class Routes:
    """Owner of the tickets that have not ended. Only the caller that removes a ticket reports its end."""

    def __init__(self) -> None:
        self._routes: dict[str, _Route] = {}
        self._lock = threading.Lock()

    def open(self, ticket_id: str, num_links: int = 1) -> bool:
        """Register a ticket before any link has it, so that a link on which it ends at once can claim it."""
        with self._lock:
            if ticket_id in self._routes:
                return False
            self._routes[ticket_id] = _Route(num_links)
            return True

    def add(self, ticket_id: str, link: Link) -> bool:
        """Add `link` to the ticket's links; return False if the ticket has ended in the meantime."""
        with self._lock:
            route = self._routes.get(ticket_id)
            if route is None:
                return False
            route.links += (link,)
            return True

    def is_open(self, ticket_id: str) -> bool:
        """Return whether the ticket has not been removed: while it is open, its blocks are held. Any thread."""
        return ticket_id in self._routes

    def links(self, ticket_id: str) -> tuple[Link, ...]:
        """Return the links of a ticket; none if it has ended."""
        route = self._routes.get(ticket_id)
        return () if route is None else route.links

    def acked(self, ticket_id: str, stats: SendStats) -> SendStats | None:
        """Record one link's ack. The last one removes the ticket and returns the merged statistics to be reported."""
        with self._lock:
            route = self._routes.get(ticket_id)
            if route is None:
                return None
            route.acked.append(stats)
            if len(route.acked) < route.num_links:
                return None
        return merge_stats(route.acked) if self.claim(ticket_id) else None

    def claim(self, ticket_id: str) -> bool:
        """Remove the ticket; True exactly once: for the caller that reports its end."""
        return self.take(ticket_id) is not None

    def take(self, ticket_id: str) -> tuple[Link, ...] | None:
        """Remove the ticket, also from its links' load, and return the links; None if it has ended."""
        with self._lock:
            route = self._routes.pop(ticket_id, None)
        if route is None:
            return None
        for link in route.links:
            link.ended(ticket_id)
        return route.links

    def clear(self) -> None:
        """End all tickets without a report."""
        with self._lock:
            self._routes.clear()
