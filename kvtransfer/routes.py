"""Which links each open ticket goes over, one to each rank of D that is sent to, and who may report its ending."""

import threading
from dataclasses import dataclass, field

from kvtransfer.interface import SendStats
from kvtransfer.link import Link
from kvtransfer.totals import merge_stats


@dataclass(slots=True)
class _Route:
    """`num_links` it is to go over, those it does, and what was acked on each."""

    num_links: int
    links: tuple[Link, ...] = ()
    acked: list[SendStats] = field(default_factory=list)


class Routes:
    """Owner of the tickets that have not ended. Whoever takes one out reports its ending: nobody else can."""

    def __init__(self) -> None:
        self._routes: dict[str, _Route] = {}
        self._lock = threading.Lock()

    def open(self, ticket_id: str, num_links: int = 1) -> bool:
        """Make a ticket known before any link hears of it, so that one which ends at once can claim it."""
        with self._lock:
            if ticket_id in self._routes:
                return False
            self._routes[ticket_id] = _Route(num_links)
            return True

    def add(self, ticket_id: str, link: Link) -> bool:
        """The ticket goes over `link` too; False for one that has ended meanwhile."""
        with self._lock:
            route = self._routes.get(ticket_id)
            if route is None:
                return False
            route.links += (link,)
            return True

    def is_open(self, ticket_id: str) -> bool:
        """Whether nobody has taken the ticket out: until somebody does, its blocks are held. Any thread."""
        return ticket_id in self._routes

    def links(self, ticket_id: str) -> tuple[Link, ...]:
        """The links of a ticket; none for one that has ended."""
        route = self._routes.get(ticket_id)
        return () if route is None else route.links

    def acked(self, ticket_id: str, stats: SendStats) -> SendStats | None:
        """One link's part was acked. After the last one the ticket is out: return the figures of all to be reported."""
        with self._lock:
            route = self._routes.get(ticket_id)
            if route is None:
                return None
            route.acked.append(stats)
            if len(route.acked) < route.num_links:
                return None
        return merge_stats(route.acked) if self.claim(ticket_id) else None

    def claim(self, ticket_id: str) -> bool:
        """Take the ticket out: True exactly once, the right to report its ending."""
        return self.take(ticket_id) is not None

    def take(self, ticket_id: str) -> tuple[Link, ...] | None:
        """Take the ticket out and return its links, whose load it is no more; None for one that has ended."""
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
