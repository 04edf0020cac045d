"""Frames whose digest differed and that were asked for again: corrupt, or of blocks that were free by then.

differed --the sender sends it again--> corrupt         it held the blocks, so that the bytes were not what it had
         --the sender says ABORT--> dropped             it had ended the ticket, and used the blocks again
         --the link is lost--> corrupt                  nobody will tell

A sender says one of these in any case, also of a ticket that ended here meanwhile: it heard NACK before that.
"""

import threading


class SuspectFrames:
    """Owner of those that are neither yet, by link and ticket. Thread-safe."""

    def __init__(self) -> None:
        self._by_link: dict[int, dict[str, set[int]]] = {}
        self._lock = threading.Lock()

    def add(self, ticket_id: str, link: int, number: int) -> None:
        """Frame `number` of a link was asked for again."""
        with self._lock:
            self._by_link.setdefault(link, {}).setdefault(ticket_id, set()).add(number)

    def comes_again(self, ticket_id: str, link: int, number: int) -> bool:
        """Whether this frame is one of them; then it is so no more."""
        if link not in self._by_link:
            return False
        with self._lock:
            those = self._by_link.get(link, {}).get(ticket_id, set())
            known = number in those
            those.discard(number)
            if known and not those:
                self._forget(ticket_id, link)
            return known

    def aborted(self, ticket_id: str, link: int) -> int:
        """The sender has ended the ticket: return how many of the link there still were."""
        with self._lock:
            count = len(self._by_link.get(link, {}).get(ticket_id, ()))
            if count:
                self._forget(ticket_id, link)
            return count

    def lost(self, link: int) -> int:
        """The link is gone: return how many there still were."""
        with self._lock:
            return sum(map(len, self._by_link.pop(link, {}).values()))

    def _forget(self, ticket_id: str, link: int) -> None:
        tickets = self._by_link[link]
        del tickets[ticket_id]
        if not tickets:
            del self._by_link[link]
