"""Frames requested again after a digest mismatch: corrupt, or read from blocks that were already free.

mismatch --the sender resends it--> corrupt           it still held the blocks, so the bytes read were wrong
         --the sender sends ABORT--> dropped          it had ended the ticket, and reused the blocks
         --the link is lost--> corrupt                the sender cannot answer any more

After a NACK the sender does one of these in any case, even if the ticket has ended here in the meantime.
"""

import threading


class SuspectFrames:
    """Owner of the frames not yet counted as corrupt or dropped, by link and ticket. Thread-safe."""

    def __init__(self) -> None:
        self._by_link: dict[int, dict[str, set[int]]] = {}
        self._lock = threading.Lock()

    def add(self, ticket_id: str, link: int, number: int) -> None:
        """Record that frame `number` of a link was requested again."""
        with self._lock:
            self._by_link.setdefault(link, {}).setdefault(ticket_id, set()).add(number)

    def is_resent(self, ticket_id: str, link: int, number: int) -> bool:
        """Return whether this frame is one of them, and remove it."""
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
        """The sender has ended the ticket: remove its frames of the link and return their number."""
        with self._lock:
            count = len(self._by_link.get(link, {}).get(ticket_id, ()))
            if count:
                self._forget(ticket_id, link)
            return count

    def lost(self, link: int) -> int:
        """The link is lost: remove its frames and return their number."""
        with self._lock:
            return sum(map(len, self._by_link.pop(link, {}).values()))

    def _forget(self, ticket_id: str, link: int) -> None:
        tickets = self._by_link[link]
        del tickets[ticket_id]
        if not tickets:
            del self._by_link[link]
