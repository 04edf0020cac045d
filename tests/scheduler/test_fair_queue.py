"""The order of the queue: priorities, shares of tenants, and the cost of a step."""

import itertools
from collections import Counter
from dataclasses import dataclass

from scheduler.queue.fair_queue import FairQueue


@dataclass(eq=False)
class Item:
    """An entry of the queue."""

    name: str
    tenant: str = ""
    priority: int = 0
    cost: int = 10
    turn: int = 0


def queue_of(*items: Item) -> FairQueue[Item]:
    queue: FairQueue[Item] = FairQueue()
    for item in items:
        queue.add(item)
    return queue


def granted(queue: FairQueue[Item], count: int) -> list[Item]:
    """Grant the first `count`, one after another."""
    items = []
    for _ in range(count):
        item = next(queue.order())
        queue.grant(item)
        items.append(item)
    return items


def names(items: list[Item]) -> list[str]:
    return [item.name for item in items]


def test_lower_priority_numbers_go_first_and_equal_ones_in_order() -> None:
    queue = queue_of(Item("a", priority=1), Item("b"), Item("c", priority=-1), Item("d"), Item("e", priority=1))

    assert names(list(queue.order())) == ["c", "b", "d", "a", "e"]


def test_a_tenants_prompt_does_not_wait_for_anothers_thousand() -> None:
    queue = queue_of(*(Item(f"a{number}", "a") for number in range(1000)))
    granted(queue, 100)
    queue.add(Item("b", "b"))

    assert "b" in names(granted(queue, 2))


def test_tenants_get_equal_tokens_for_any_prompt_size() -> None:
    small = [Item("small", "small", cost=10) for _ in range(500)]
    large = [Item("large", "large", cost=100) for _ in range(50)]
    taken = Counter[str]()
    for item in granted(queue_of(*small, *large), 220):
        taken[item.tenant] += item.cost

    assert abs(taken["small"] - taken["large"]) <= 110


def test_a_sequential_tenant_gets_no_more_than_its_share() -> None:
    queue = queue_of(*(Item("many", "many", cost=10) for _ in range(200)))
    one = Item("large", "one", cost=100)
    queue.add(one)
    taken = Counter[str]()
    for _ in range(100):
        (item,) = granted(queue, 1)
        taken[item.tenant] += item.cost
        if item is one:
            one = Item("large", "one", cost=100)
            queue.add(one)

    assert abs(taken["many"] - taken["one"]) <= 110


def test_an_idle_tenant_saves_up_nothing() -> None:
    queue = queue_of(*(Item("a", "a") for _ in range(100)))
    granted(queue, 50)
    for _ in range(20):
        queue.add(Item("b", "b"))

    assert names(granted(queue, 10)).count("b") <= 6


def test_a_cancelled_prompt_costs_its_tenant_nothing() -> None:
    gone = [Item("gone", "a", cost=1000) for _ in range(5)]
    queue = queue_of(*gone, Item("a", "a"), Item("b", "b"))
    for item in gone:
        queue.remove(item)

    assert sorted(names(granted(queue, 2))) == ["a", "b"]
    assert len(queue) == 0


def test_a_returned_prompt_goes_first_and_is_charged_once() -> None:
    again, more = Item("again", "a", cost=1000), Item("more", "a")
    queue = queue_of(again, Item("b0", "b"), Item("b1", "b", cost=2000))
    granted(queue, 2)
    queue.add_front(again)
    queue.add(more)

    assert again in queue
    assert names(granted(queue, 3)) == ["again", "b1", "more"]


def test_a_requests_later_prompts_wait_for_its_tenants_others() -> None:
    many = [Item(f"many{turn}", turn=turn) for turn in range(3)]
    queue = queue_of(*many, *(Item(f"one{number}") for number in range(8)))

    assert names(granted(queue, 6)) == ["many0", "one0", "one1", "one2", "one3", "one4"]
    assert "many1" in names(granted(queue, 5))


def test_one_grant_in_sixteen_goes_to_the_priority_that_waits_longest() -> None:
    queue = queue_of(Item("low", priority=9), Item("lower", priority=10), *(Item("high") for _ in range(100)))
    order = names(granted(queue, 32))

    assert (order[15], order[31]) == ("low", "lower")
    assert order.count("high") == 30


def test_late_low_priority_prompts_wait_for_all_before_them() -> None:
    queue = queue_of(*(Item("high") for _ in range(40)), Item("low", priority=1))

    assert names(granted(queue, 41)) == ["high"] * 40 + ["low"]


def test_the_order_shown_is_the_order_granted() -> None:
    items = [Item(str(n), "abc"[n % 3], priority=n % 2, cost=1 + n * 7 % 31) for n in range(60)]
    queue = queue_of(*items)
    foreseen = list(itertools.islice(queue.order(), 15))

    assert granted(queue, 15) == foreseen


def test_finished_tenants_leave_nothing_behind() -> None:
    queue = queue_of(*(Item(str(n), f"tenant{n % 7}", priority=n) for n in range(200)))
    granted(queue, 200)

    assert list(queue.order()) == []
    assert queue._bands == {}
    assert queue._priorities == []
    assert not queue._by_age
