"""The order of the queue: by priority; within it, by each tenant's fair share; per tenant, first come, first served.

front  ->  overdue  ->  band of the lowest priority value (the most urgent)  ->  next band ...
                        line of the tenant served least  ->  next line ...

Start-time fair queueing: the line with the smallest `start` goes first, and its start grows by the cost of each grant,
in tokens. A new line starts where its tenant's last one in the band ended, but not below the smallest start at the
band's last grant, so nobody saves up a share or overtakes by leaving and returning. Two tenants that always have
prompts waiting differ by at most their two largest prompts. No clock, no I/O.
"""

import bisect
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

_GRANTS_PER_TURN = 4
"""A request's second prompt is queued as if it had arrived four grants of its line later, its third eight later."""
_OLDEST_EVERY = 16
"""One in this many grants goes to the priority whose oldest prompt has waited longest, even if another is first."""


class Queued(Protocol):
    """The properties of a queued item; `cost` is at least 1."""

    tenant: str
    priority: int
    turn: int
    cost: int


T = TypeVar("T", bound=Queued)


class FairQueue(Generic[T]):
    """Owner of the order. Each item is in it once, from `add` or `add_front` to `remove` or `grant`.

    An operation costs about the logarithm of the queue's length (and one move of a list's tail), also for removals.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._front: dict[T, None] = {}
        self._by_age: OrderedDict[T, _Place] = OrderedDict()
        self._bands: dict[int, _Band[T]] = {}
        self._priorities: list[int] = []
        self._since_oldest = 0

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self._front) + len(self._by_age)

    def __contains__(self, item: T) -> bool:
        """Return whether the item is waiting."""
        return item in self._by_age or item in self._front

    def add(self, item: T) -> None:
        """Queue an item."""
        band = self._bands.get(item.priority)
        if band is None:
            band = self._bands[item.priority] = _Band()
            bisect.insort(self._priorities, item.priority)
        self._by_age[item] = band.add(item, next(self._numbers))

    def add_front(self, item: T) -> None:
        """Queue an already granted item again, ahead of all but earlier such items; it is already paid for."""
        self._front[item] = None

    def remove(self, item: T) -> None:
        """Remove an item without charging anyone."""
        if item in self._front:
            del self._front[item]
            return
        band = self._bands[item.priority]
        band.remove(item.tenant, self._by_age.pop(item))
        if not band:
            del self._bands[item.priority]
            del self._priorities[bisect.bisect_left(self._priorities, item.priority)]

    def grant(self, item: T) -> None:
        """Remove an item that may run, and charge its tenant."""
        if item not in self._front:
            self._since_oldest = 0 if item is self._oldest_overdue() else self._since_oldest + 1
            self._bands[item.priority].pay(item.tenant, item.cost)
        self.remove(item)

    def order(self) -> Iterator[T]:
        """Yield the items in the order of their turns; the queue must not change meanwhile."""
        yield from self._front
        overdue = self._oldest_overdue()
        if overdue is not None:
            yield overdue
        for priority in self._priorities:
            for item in self._bands[priority].order():
                if item is not overdue:
                    yield item

    def _oldest_overdue(self) -> T | None:
        """Return the next item of the band with the longest wait, if it is due and that band is not the first."""
        if self._since_oldest + 1 < _OLDEST_EVERY or len(self._priorities) < 2:
            return None
        oldest = next(iter(self._by_age))
        return None if oldest.priority == self._priorities[0] else next(self._bands[oldest.priority].order())


_Place = tuple[int, int]
"""An item's position in its line: the number of grants of the line before its turn, and a sequence number."""


class _Line(Generic[T]):
    """Owner of one tenant's items in one band."""

    def __init__(self, start: int, number: int) -> None:
        self.start = start
        self.number = number
        self.num_granted = 0
        self.items: list[tuple[int, int, T]] = []  # by place

    @property
    def key(self) -> "tuple[int, int, _Line[T]]":
        """The line's sort key; numbers differ, so lines themselves are never compared."""
        return (self.start, self.number, self)


class _Band(Generic[T]):
    """Owner of the lines of one priority, and of the shares of tenants without items, while any item is waiting."""

    def __init__(self) -> None:
        self._now = 0
        self._lines: dict[str, _Line[T]] = {}
        self._sorted: list[tuple[int, int, _Line[T]]] = []
        self._start_by_idle_tenant: dict[str, int] = {}

    def __bool__(self) -> bool:
        """Return whether anything is waiting."""
        return bool(self._lines)

    def add(self, item: T, number: int) -> _Place:
        """Put an item into its tenant's line; return its place."""
        line = self._lines.get(item.tenant)
        if line is None:
            line = self._lines[item.tenant] = _Line(
                max(self._now, self._start_by_idle_tenant.pop(item.tenant, 0)), number
            )
            bisect.insort(self._sorted, line.key)
        place = (line.num_granted + _GRANTS_PER_TURN * item.turn, number)
        bisect.insort(line.items, (*place, item))
        return place

    def remove(self, tenant: str, place: _Place) -> None:
        """Remove the item at a place."""
        line = self._lines[tenant]
        del line.items[bisect.bisect_left(line.items, place)]  # a shorter tuple sorts first
        if not line.items:
            self._take_out(line)
            del self._lines[tenant]
            self._start_by_idle_tenant[tenant] = line.start

    def pay(self, tenant: str, cost: int) -> None:
        """Charge a grant to a tenant."""
        line = self._lines[tenant]
        self._now = max(self._now, self._sorted[0][0])
        self._take_out(line)
        line.start += cost
        line.num_granted += 1
        bisect.insort(self._sorted, line.key)

    def order(self) -> Iterator[T]:
        """Yield all items in the order in which consecutive grants would take them."""
        at = 0
        later: list[tuple[int, int, _Line[T], int]] = []  # the next item of lines already visited
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
