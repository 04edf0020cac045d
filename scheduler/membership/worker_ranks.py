"""One member for each data-parallel rank of a worker: its entry in the table is rank 0, and the other ranks are added.

The number of ranks is known once the worker has been described, and may have changed when the worker comes back.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from scheduler.membership.compatibility import ExpectedInstance

_INDICES = 1_000_000
"""Rank k of entry i has index k * _INDICES + i."""
_RANK = "#rank="


def rank_address(url: str, rank: int) -> str:
    """Return the address of a worker's rank."""
    return f"{url}{_RANK}{rank}" if rank else url


def split_address(address: str) -> tuple[str, int]:
    """Return the URL and the rank of an address."""
    url, _, rank = address.partition(_RANK)
    return url.rstrip("/"), int(rank or 0)


class WorkerRanks:
    """Owner of the table's entries and of the number of ranks of each worker among them."""

    def __init__(self, entries: Sequence[ExpectedInstance]) -> None:
        self._entries = tuple(entries)
        self._num_ranks: dict[str, int] = {}

    def change(self, entries: Sequence[ExpectedInstance]) -> None:
        """Use the entries of another table."""
        self._entries = tuple(entries)
        addresses = {entry.address for entry in entries}
        self._num_ranks = {address: number for address, number in self._num_ranks.items() if address in addresses}

    def note(self, expected: ExpectedInstance, num_ranks: int) -> bool:
        """Record how many ranks a worker has; return whether that changes the members."""
        if expected not in self._entries or self._num_ranks.get(expected.address, 1) == num_ranks:
            return False
        self._num_ranks[expected.address] = num_ranks
        return True

    def members(self) -> list[ExpectedInstance]:
        """Return the entries, each followed by the other ranks of its worker."""
        return [member for entry in self._entries for member in self._ranks(entry)]

    def _ranks(self, entry: ExpectedInstance) -> Iterator[ExpectedInstance]:
        yield entry
        for rank in range(1, self._num_ranks.get(entry.address, 1)):
            yield dataclasses.replace(
                entry,
                index=rank * _INDICES + entry.index,
                name=f"{entry.name}-rank-{rank}",
                address=rank_address(entry.address, rank),
            )
