"""A prompt's block table, sent to a rank incrementally: each put carries only the blocks that are new.

rank 0: TablesSent == number of blocks kept, and the new ones after them ==> TablesReceived: the rank
"""

from collections.abc import Iterable, Sequence


class TablesSent:
    """Owner of each ticket's block table as the rank knows it, from the ticket's begin to its end."""

    def __init__(self) -> None:
        self._known: dict[str, list[tuple[int, ...]]] = {}

    def begin(self, ticket_id: str) -> None:
        """Start with an empty table."""
        self._known[ticket_id] = [()]

    def growth(self, ticket_id: str, block_ids: Sequence[int]) -> tuple[int, tuple[int, ...]] | None:
        """Return how many of the rank's blocks remain valid, and the new ones after them; None for a ticket that ended.

        The caller must send them: they count as known from now on. One thread at a time calls this for a ticket.
        """
        entry = self._known.get(ticket_id)
        if entry is None:
            return None
        known, entry[0] = entry[0], tuple(block_ids)
        kept = len(known) if entry[0][: len(known)] == known else 0
        return kept, entry[0][kept:]

    def end(self, ticket_id: str) -> None:
        """Forget the ticket. Any thread."""
        self._known.pop(ticket_id, None)


class TablesReceived:
    """Owner of the block tables that a rank has received from rank 0, by ticket. One thread calls begin and take."""

    def __init__(self) -> None:
        self._tables: dict[str, list[tuple[int, ...]]] = {}

    def begin(self, ticket_id: str) -> None:
        """Start with an empty table."""
        self._tables[ticket_id] = [()]

    def take(self, ticket_id: str, kept: int, more: Iterable[int]) -> tuple[int, ...] | None:
        """Return the whole table, None for a ticket that ended; the same object while there are no new blocks.

        Raises ValueError if more blocks are to be kept than are known.
        """
        entry = self._tables.get(ticket_id)
        if entry is None:
            return None
        if not 0 <= kept <= len(entry[0]):
            raise ValueError(f"ticket {ticket_id} is to keep {kept} of its blocks, but only {len(entry[0])} are known")
        entry[0] = entry[0][:kept] + tuple(more)
        return entry[0]

    def end(self, ticket_id: str) -> None:
        """Forget the ticket. Any thread."""
        self._tables.pop(ticket_id, None)
