"""Frames read from the sender's pool whose digest differed: corrupt, or of blocks that were free by then.

differed --the sender sends it again--> corrupt         it held the blocks, so that the bytes were not what it had
         --the sender says ABORT--> dropped             it had ended the ticket, and used the blocks again
         --the ticket ends otherwise--> corrupt
"""

import threading


class Suspects:
    """Owner of those that are neither yet, by ticket. Thread-safe."""

    def __init__(self) -> None:
        self._by_ticket: dict[str, set[tuple[int, int]]] = {}
        self._lock = threading.Lock()

    def add(self, ticket_id: str, link: int, number: int) -> None:
        """Frame `number` of a link was asked for again."""
        with self._lock:
            self._by_ticket.setdefault(ticket_id, set()).add((link, number))

    def comes_again(self, ticket_id: str, link: int, number: int) -> bool:
        """Whether this frame is one of them; then it is so no more."""
        if ticket_id not in self._by_ticket:
            return False
        with self._lock:
            those = self._by_ticket.get(ticket_id, set())
            known = (link, number) in those
            those.discard((link, number))
            if not those:
                self._by_ticket.pop(ticket_id, None)
            return known

    def end(self, ticket_id: str) -> int:
        """The ticket is over: return how many there still were."""
        with self._lock:
            return len(self._by_ticket.pop(ticket_id, ()))
