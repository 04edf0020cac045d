"""Puts that wait behind each other go out together, and nothing else changes its place."""

from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.link_ops import Drop, Finish, Op, Put, Tend, merge_puts

A, B = "aa" * 16, "bb" * 16


def put(ticket_id: str, layer: int, start: int, end: int) -> Put:
    return Put(ticket_id, layer, start, end, tuple(range(end)))


def test_chunks_of_one_layer_are_joined_and_layers_keep_their_order() -> None:
    waiting: list[Op] = [put(A, layer, start, start + 4) for start in (0, 4, 8) for layer in range(2)]

    assert list(merge_puts(waiting)) == [put(A, 0, 0, 12), put(A, 1, 0, 12)]


def test_what_does_not_continue_is_left_alone() -> None:
    waiting: list[Op] = [put(A, 0, 0, 4), put(B, 0, 4, 8), put(A, 0, 5, 8), Tend(), put(A, 0, 8, 9), Drop(A, "over")]

    assert list(merge_puts(waiting)) == [put(A, 0, 0, 4), put(B, 0, 4, 8), put(A, 0, 5, 9), Tend(), Drop(A, "over")]


@given(st.lists(st.tuples(st.sampled_from([A, B]), st.integers(0, 2), st.integers(1, 5)), max_size=40))
def test_every_token_of_every_layer_goes_out_once_and_before_its_commit(steps: list[tuple[str, int, int]]) -> None:
    ends: dict[tuple[str, int], int] = {}
    waiting: list[Op] = []
    for ticket_id, layer, count in steps:
        start = ends.get((ticket_id, layer), 0)
        ends[ticket_id, layer] = start + count
        waiting.append(put(ticket_id, layer, start, start + count))
    waiting += [Finish(A, b""), Finish(B, b"")]

    merged = list(merge_puts(waiting))

    assert merged[-2:] == waiting[-2:]
    assert sorted((op.ticket_id, op.layer, op.start, op.end) for op in merged if isinstance(op, Put)) == sorted(
        (ticket_id, layer, 0, end) for (ticket_id, layer), end in ends.items()
    )
