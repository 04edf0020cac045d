"""How much may wait, in total and per tenant."""

from scheduler.limits import ControlLimits
from scheduler.queue.room import QueueRoom


def filled(room: QueueRoom, tenant: str, num_tokens: int = 10) -> int:
    """Queue the tenant's prompts until one is refused; return how many were accepted."""
    count = 0
    while room.refusal(tenant, 1, num_tokens) is None:
        room.take(tenant, num_tokens)
        count += 1
    return count


def test_without_keys_anyone_may_use_the_whole_queue() -> None:
    room = QueueRoom(ControlLimits(max_queued_requests=100))

    assert filled(room, "") == 100
    assert room.refusal("", 1, 10) == (
        "the queue is full: with this request 101 prompts (limit 100) and 1010 prompt tokens (limit 4000000) would "
        "wait",
        "max_num_queued_reqs",
    )


def test_an_empty_queue_accepts_a_request_larger_than_the_queue() -> None:
    room = QueueRoom(ControlLimits(max_queued_requests=2, max_queued_tokens=50))

    assert room.refusal("", 3, 200) is None


def test_one_key_leaves_as_much_room_as_it_takes() -> None:
    room = QueueRoom(ControlLimits(max_queued_requests=100, num_tenants=3))

    assert filled(room, "a") == 50
    refusal = room.refusal("a", 1, 10)
    assert refusal is not None
    assert refusal[0].startswith("this key's share of the queue is full: with this request 51 prompts and 510 prompt ")


def test_a_key_that_comes_last_always_finds_room() -> None:
    room = QueueRoom(ControlLimits(max_queued_requests=1000, num_tenants=20))
    found = [filled(room, f"key{number}") for number in range(8)]

    assert found == [500, 250, 125, 62, 31, 16, 8, 4]
    assert all(room.refusal(f"late{number}", 1, 10) is None for number in range(3))


def test_keys_that_fill_the_queue_together_end_with_the_same_share() -> None:
    room = QueueRoom(ControlLimits(max_queued_requests=99, num_tenants=2))
    shares = {"a": 0, "b": 0}
    for turn in range(400):
        tenant = "ab"[turn % 2]
        if room.refusal(tenant, 1, 1) is None:
            room.take(tenant, 1)
            shares[tenant] += 1

    assert shares == {"a": 33, "b": 33}


def test_tokens_are_shared_like_prompts() -> None:
    room = QueueRoom(ControlLimits(max_queued_tokens=1000, num_tenants=2))

    assert filled(room, "a", 100) == 5
    assert room.refusal("b", 1, 500) is None
    assert (room.refusal("b", 1, 501) or "")[1:] == ("max_num_queued_tokens",)


def test_finished_prompts_free_their_room() -> None:
    room = QueueRoom(ControlLimits(max_queued_requests=10, num_tenants=2))
    filled(room, "a")
    for _ in range(5):
        room.give_back("a", 10)

    assert (room.num_prompts, room.num_tokens) == (0, 0)
    assert filled(room, "a") == 5
