"""A prompt's block table told to a rank once, and then by its growth: a put brings only the blocks that are new.

rank 0: TablesSent == how many blocks hold on, those behind them ==> TablesReceived: the rank
"""

from collections.abc import Iterable, Sequence


class TablesSent:
    """Owner of what a rank knows of the table of each ticket, from its begin to its end."""

    def __init__(self) -> None:
        self._known: dict[str, list[tuple[int, ...]]] = {}

    def begin(self, ticket_id: str) -> None:
        """The rank knows no block of it yet."""
        self._known[ticket_id] = [()]

    def growth(self, ticket_id: str, block_ids: Sequence[int]) -> tuple[int, tuple[int, ...]] | None:
        """Return how many blocks that the rank knows hold on, and those to come behind; None for a ticket that ended.

        The rank is to be told of it: it is taken for known. One thread at a time asks for a ticket's.
        """
        entry = self._known.get(ticket_id)
        if entry is None:
            return None
        known, entry[0] = entry[0], tuple(block_ids)
        kept = len(known) if entry[0][: len(known)] == known else 0
        return kept, entry[0][kept:]

    def end(self, ticket_id: str) -> None:
        """Forget it. Any thread."""
        self._known.pop(ticket_id, None)


class TablesReceived:
    """Owner of the tables of the tickets that a rank sends, as rank 0 told them. One thread begins and takes."""

    def __init__(self) -> None:
        self._tables: dict[str, list[tuple[int, ...]]] = {}

    def begin(self, ticket_id: str) -> None:
        """No block of it is known yet."""
        self._tables[ticket_id] = [()]

    def take(self, ticket_id: str, kept: int, more: Iterable[int]) -> tuple[int, ...] | None:
        """Return the whole table, None for a ticket that ended; the same object while nothing is new.

        Raises ValueError where more blocks hold on than are known.
        """
        entry = self._tables.get(ticket_id)
        if entry is None:
            return None
        if not 0 <= kept <= len(entry[0]):
            raise ValueError(f"{kept} blocks of ticket {ticket_id} hold on, and {len(entry[0])} are known")
        entry[0] = entry[0][:kept] + tuple(more)
        return entry[0]

    def end(self, ticket_id: str) -> None:
        """Forget it. Any thread."""
        self._tables.pop(ticket_id, None)
