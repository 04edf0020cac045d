"""Which orders of sums and KV operations on shared devices can deadlock: a model of devices and their queues.

A device runs the operations of one queue one after another, in the order in which they were issued, and those of
several queues at once. An operation ends when all members of its communicator run it: the ranks of one instance for a
sum, two ranks of different instances for a frame. All members issue a communicator's operations in the same order, at
any time, ahead without limit; a receive is issued after its frame was announced. A queue is what the device really
runs in order: a stream, or several streams that share one of the device's connections. A link whose operation waits
for its time limit is aborted at both ends: none of its operations runs or is issued after that.
"""

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples


@dataclass(frozen=True)
class Communicator:
    """A communicator of the ranks of an instance, or of a link: the sender, then the receiver."""

    members: tuple[int, ...]
    num_operations: int
    is_link: bool = False


Queues = Callable[[Communicator, int], object]


def own(communicator: Communicator, device: int) -> object:
    """Return the queue of a device that runs the communicator's operations: each has its own."""
    return communicator


def one(communicator: Communicator, device: int) -> object:
    """Return the same queue for all communicators."""
    return None


def by_kind(communicator: Communicator, device: int) -> object:
    """Return one queue each for sums, sends and receives."""
    return "sums" if not communicator.is_link else "sends" if communicator.members[0] == device else "receives"


class Devices:
    """The operations that are issued and have not ended."""

    def __init__(self, communicators: list[Communicator], queue_of: Queues) -> None:
        self._communicators, self._queue_of = communicators, queue_of
        self._queues: dict[tuple[int, object], deque[Communicator]] = defaultdict(deque)
        self._issued: dict[tuple[Communicator, int], int] = defaultdict(int)
        self._ended: dict[Communicator, int] = defaultdict(int)
        self._aborted: set[Communicator] = set()

    def next_issues(self) -> Iterator[tuple[Communicator, int]]:
        """Yield what may be issued now: a communicator and the device."""
        for communicator in self._communicators:
            for device in communicator.members if communicator not in self._aborted else ():
                number = self._issued[communicator, device]
                announced = self._issued[communicator, communicator.members[0]]
                can_receive = not communicator.is_link or device == communicator.members[0] or number < announced
                if number < communicator.num_operations and can_receive:
                    yield communicator, device

    def issue(self, communicator: Communicator, device: int) -> None:
        """Add the communicator's next operation to the device's queue."""
        self._queues[device, self._queue_of(communicator, device)].append(communicator)
        self._issued[communicator, device] += 1

    def next_ends(self) -> list[Communicator]:
        """Return the communicators whose operation all members run."""
        return [one for one in self._communicators if all(self._runs(one, device) for device in one.members)]

    def end(self, communicator: Communicator) -> None:
        """End the operation that all members run."""
        for device in communicator.members:
            self._queues[device, self._queue_of(communicator, device)].popleft()
        self._ended[communicator] += 1

    def abort_waiting_links(self) -> None:
        """Abort the links with an operation that has not ended."""
        self._aborted |= {one for queue in self._queues.values() for one in queue if one.is_link}
        for place, queue in self._queues.items():
            self._queues[place] = deque(one for one in queue if one not in self._aborted)

    @property
    def num_aborted(self) -> int:
        """Number of aborted links."""
        return len(self._aborted)

    def is_done(self) -> bool:
        """Return whether all operations have ended, or their link was aborted."""
        return all(self._ended[one] == one.num_operations for one in self._communicators if one not in self._aborted)

    def _runs(self, communicator: Communicator, device: int) -> bool:
        queue = self._queues[device, self._queue_of(communicator, device)]
        return bool(queue) and queue[0] is communicator


def completes(devices: Devices, order: random.Random) -> bool:
    """Issue and end operations in a random order; return whether all have ended, False for a deadlock."""
    while True:
        issues, ends = list(devices.next_issues()), devices.next_ends()
        if not issues and not ends:
            return devices.is_done()
        chosen = order.randrange(len(issues) + len(ends))
        if chosen < len(issues):
            devices.issue(*issues[chosen])
        else:
            devices.end(ends[chosen - len(issues)])


@st.composite
def clusters(draw: st.DrawFn) -> list[Communicator]:
    """2 to 8 ranks in instances of 1 to 4, with links between ranks of different instances in both directions."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=4).filter(lambda sizes: sum(sizes) <= 8))
    ranks, instances = iter(range(sum(sizes))), []
    for size in sizes:
        instances.append(tuple(next(ranks) for _ in range(size)))
    pairs = [
        (sender, receiver)
        for one in instances for other in instances if one is not other
        for sender in one for receiver in other
    ]  # fmt: skip
    links = draw(st.lists(st.sampled_from(pairs), min_size=1, max_size=8, unique=True))
    counts = st.integers(1, 3)
    sums = [Communicator(members, draw(counts)) for members in instances if len(members) > 1]
    return sums + [Communicator(pair, draw(counts), is_link=True) for pair in links]


@examples(300)
@given(cluster=clusters(), queue_of=st.sampled_from([one, by_kind]), order=st.randoms(use_true_random=False))
def test_shared_queues_cost_links_and_never_a_sum(
    cluster: list[Communicator], queue_of: Queues, order: random.Random
) -> None:
    devices = Devices(cluster, queue_of)
    while not completes(devices, order):
        num_before = devices.num_aborted
        devices.abort_waiting_links()
        assert devices.num_aborted > num_before, "sums wait for each other"


@examples(300)
@given(cluster=clusters(), order=st.randoms(use_true_random=False))
def test_no_order_deadlocks_if_each_group_has_its_queue(cluster: list[Communicator], order: random.Random) -> None:
    assert completes(Devices(cluster, own), order)


SUMS = [Communicator((0, 1), 1), Communicator((2, 3), 1)]
TP_PAIR = [*SUMS, Communicator((0, 2), 1, is_link=True), Communicator((1, 3), 1, is_link=True)]
FOUR_LINKS = [Communicator((sender, receiver), 1, is_link=True) for sender in (0, 1) for receiver in (2, 3)]


@pytest.mark.parametrize(
    ("cluster", "queue_of"),
    [
        pytest.param(TP_PAIR, one, id="two instances of two ranks, each device with one queue"),
        pytest.param(FOUR_LINKS, by_kind, id="two senders and two receivers, each with one queue"),
    ],
)
def test_one_issuing_thread_does_not_prevent_a_deadlock(cluster: list[Communicator], queue_of: Queues) -> None:
    """Each device issues one operation after another, and a receive only once its frame was announced."""
    orders = (random.Random(seed) for seed in range(1_000))

    assert not all(completes(Devices(cluster, queue_of), order) for order in orders)
