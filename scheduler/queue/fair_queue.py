"""Who is next: by priority, in one priority a fair share for each tenant, of one tenant first come, first served.

front  ->  overdue  ->  band of the lowest priority  ->  next band ...
                        line of the tenant that had least  ->  next line ...

Start-time fair queueing: a line's `start` is what its tenant had of the band when its head's turn came, in tokens. The
least goes first and grows by the cost of what is granted; a tenant that comes anew begins where the band is, so nobody
saves up, and nobody who was served goes before one who was not. Two tenants that both wait all the while never differ
by more than their two largest prompts. No clock, no I/O.
"""

import bisect
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

_GRANTS_A_TURN = 4
"""A request's second prompt queues as if it had come after four grants more of its line, its third after eight."""
_OLDEST_EVERY = 16
"""Of so many grants one goes to the priority whose oldest prompt waits longest, where that is not the best one."""


class Queued(Protocol):
    """What the queue needs to know of what waits in it; `cost` is at least 1."""

    tenant: str
    priority: int
    turn: int
    cost: int


T = TypeVar("T", bound=Queued)


class FairQueue(Generic[T]):
    """Owns the order. Each item is in it once, from `add` or `add_front` to `remove` or `grant`.

    A step costs about the logarithm of what waits (and one move of a list's tail), whoever leaves.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._front: dict[T, None] = {}
        self._by_age: OrderedDict[T, _Place] = OrderedDict()
        self._bands: dict[int, _Band[T]] = {}
        self._priorities: list[int] = []
        self._since_oldest = 0

    def __len__(self) -> int:
        """Items in it."""
        return len(self._front) + len(self._by_age)

    def __contains__(self, item: T) -> bool:
        """Whether it waits."""
        return item in self._by_age or item in self._front

    def add(self, item: T) -> None:
        """Let an item wait its turn."""
        band = self._bands.get(item.priority)
        if band is None:
            band = self._bands[item.priority] = _Band()
            bisect.insort(self._priorities, item.priority)
        self._by_age[item] = band.add(item, next(self._numbers))

    def add_front(self, item: T) -> None:
        """Let an item that was granted before go first, behind others of its kind; its tenant has paid for it."""
        self._front[item] = None

    def remove(self, item: T) -> None:
        """Take an item out: it costs nobody anything."""
        if item in self._front:
            del self._front[item]
            return
        band = self._bands[item.priority]
        band.remove(item.tenant, self._by_age.pop(item))
        if not band:
            del self._bands[item.priority]
            del self._priorities[bisect.bisect_left(self._priorities, item.priority)]

    def grant(self, item: T) -> None:
        """Take an item out that goes on: its tenant pays."""
        if item not in self._front:
            self._since_oldest = 0 if item is self._overdue() else self._since_oldest + 1
            self._bands[item.priority].pay(item.tenant, item.cost)
        self.remove(item)

    def order(self) -> Iterator[T]:
        """Yield what waits in the order of its turns; the queue must not change meanwhile."""
        yield from self._front
        overdue = self._overdue()
        if overdue is not None:
            yield overdue
        for priority in self._priorities:
            for item in self._bands[priority].order():
                if item is not overdue:
                    yield item

    def _overdue(self) -> T | None:
        """Return the first of the band in which something waits longest, where it is its turn and another is better."""
        if self._since_oldest + 1 < _OLDEST_EVERY or len(self._priorities) < 2:
            return None
        oldest = next(iter(self._by_age))
        return None if oldest.priority == self._priorities[0] else next(self._bands[oldest.priority].order())


_Place = tuple[int, int]
"""Where an item stands in its line: the grants of the line after which it is its turn, and a number for the order."""


class _Line(Generic[T]):
    """Owns what one tenant has waiting in one band."""

    def __init__(self, start: int, number: int) -> None:
        self.start = start
        self.number = number
        self.num_granted = 0
        self.items: list[tuple[int, int, T]] = []  # by place

    @property
    def key(self) -> "tuple[int, int, _Line[T]]":
        """Where the line stands among others; numbers differ, so lines are never compared."""
        return (self.start, self.number, self)


class _Band(Generic[T]):
    """Owns the lines of one priority, and what those had that have nothing waiting now, as long as anyone waits."""

    def __init__(self) -> None:
        self._now = 0
        self._lines: dict[str, _Line[T]] = {}
        self._sorted: list[tuple[int, int, _Line[T]]] = []
        self._had: dict[str, int] = {}

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return bool(self._lines)

    def add(self, item: T, number: int) -> _Place:
        """Put an item into its tenant's line; return where."""
        line = self._lines.get(item.tenant)
        if line is None:
            line = self._lines[item.tenant] = _Line(max(self._now, self._had.pop(item.tenant, 0)), number)
            bisect.insort(self._sorted, line.key)
        place = (line.num_granted + _GRANTS_A_TURN * item.turn, number)
        bisect.insort(line.items, (*place, item))
        return place

    def remove(self, tenant: str, place: _Place) -> None:
        """Take the item at a place out."""
        line = self._lines[tenant]
        del line.items[bisect.bisect_left(line.items, place)]  # a shorter tuple is before
        if not line.items:
            self._take_out(line)
            del self._lines[tenant]
            self._had[tenant] = line.start

    def pay(self, tenant: str, cost: int) -> None:
        """Count a grant against a tenant."""
        line = self._lines[tenant]
        self._now = max(self._now, self._sorted[0][0])
        self._take_out(line)
        line.start += cost
        line.num_granted += 1
        bisect.insort(self._sorted, line.key)

    def order(self) -> Iterator[T]:
        """Yield everything in the order in which grants, one after the other, would take it."""
        at = 0
        later: list[tuple[int, int, _Line[T], int]] = []  # the next item of lines that had their turn here
        while later or at < len(self._sorted):
            if later and (at == len(self._sorted) or later[0][:2] < self._sorted[at][:2]):
                start, number, line, index = heapq.heappop(later)
            else:
                (start, number, line), index, at = self._sorted[at], 0, at + 1
            item = line.items[index][2]
            yield item
            if index + 1 < len(line.items):
                heapq.heappush(later, (start + item.cost, number, line, index + 1))

    def _take_out(self, line: _Line[T]) -> None:
        del self._sorted[bisect.bisect_left(self._sorted, line.key)]
