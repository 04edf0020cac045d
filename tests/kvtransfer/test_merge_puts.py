"""Consecutive puts in the queue are merged, and nothing else changes its place."""

from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.link_ops import CheckLeases, Drop, FinishTicket, Op, Put, merge_puts

A, B = "aa" * 16, "bb" * 16


def put(ticket_id: str, layer: int, start: int, end: int, *more_layers: int) -> Put:
    return Put(ticket_id, (layer, *more_layers), start, end, tuple(range(end)))


def test_chunks_and_layers_of_one_ticket_are_merged() -> None:
    waiting: list[Op] = [put(A, layer, start, start + 4) for start in (0, 4, 8) for layer in range(3)]

    assert merge_puts(waiting) == [put(A, 0, 0, 12, 1, 2)]


def test_layers_of_different_tokens_are_sent_separately() -> None:
    waiting: list[Op] = [put(A, 2, 0, 4), put(A, 0, 4, 8), put(A, 1, 4, 8), put(A, 2, 4, 8)]

    assert merge_puts(waiting) == [put(A, 2, 0, 8), put(A, 0, 4, 8, 1)]


def test_equal_tokens_in_other_blocks_are_sent_separately() -> None:
    moved = Put(A, (1,), 0, 4, (9, 8, 7, 6))

    assert merge_puts([put(A, 0, 0, 4), moved]) == [put(A, 0, 0, 4), moved]


def test_non_adjacent_puts_are_not_merged() -> None:
    waiting: list[Op] = [
        put(A, 0, 0, 4),
        put(B, 0, 4, 8),
        put(A, 0, 5, 8),
        CheckLeases(),
        put(A, 0, 8, 9),
        Drop(A, "over"),
    ]

    assert merge_puts(waiting) == [put(A, 0, 0, 4), put(B, 0, 4, 8), put(A, 0, 5, 9), CheckLeases(), Drop(A, "over")]


@given(st.lists(st.tuples(st.sampled_from([A, B]), st.integers(0, 2), st.integers(1, 5)), max_size=40))
def test_every_token_of_a_layer_is_sent_once_before_the_commit(steps: list[tuple[str, int, int]]) -> None:
    ends: dict[tuple[str, int], int] = {}
    waiting: list[Op] = []
    for ticket_id, layer, count in steps:
        start = ends.get((ticket_id, layer), 0)
        ends[ticket_id, layer] = start + count
        waiting.append(put(ticket_id, layer, start, start + count))
    waiting += [FinishTicket(A, b""), FinishTicket(B, b"")]

    merged = merge_puts(waiting)

    puts = [op for op in merged if isinstance(op, Put)]
    assert merged == [*puts, *waiting[-2:]]
    assert sorted((op.ticket_id, layer, op.start, op.end) for op in puts for layer in op.layers) == sorted(
        (ticket_id, layer, 0, end) for (ticket_id, layer), end in ends.items()
    )
    assert len(puts) == len({(ticket_id, end) for (ticket_id, _), end in ends.items()})
