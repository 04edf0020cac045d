"""Every head that a rank of D holds is sent exactly once, by a rank of P that holds it, and the load is spread."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.ranks import Senders, heads_between, receivers_of
from wire.kv_layout import Heads, KvTensor, Rank, head_range

HEADS, RANKS = st.integers(1, 40), st.integers(1, 16)


def tensor(heads: int, layer: int = 0) -> KvTensor:
    return KvTensor(layer, "k", heads, 4, "float16")


@given(HEADS, RANKS, RANKS, st.integers(0, 9))
def test_each_head_a_rank_holds_is_sent_to_it_once_by_a_holder(
    heads: int, p_ranks: int, d_ranks: int, layer: int
) -> None:
    for d in range(d_ranks):
        receiver = Rank(d, d_ranks)
        sent = {p: heads_between(tensor(heads, layer), Rank(p, p_ranks), receiver) for p in range(p_ranks)}

        assert sorted(head for those in sent.values() for head in range(*those)) == [
            *range(*head_range(heads, receiver))
        ]
        for p, those in sent.items():
            assert set(range(*those)) <= set(range(*head_range(heads, Rank(p, p_ranks))))


@given(HEADS, RANKS, RANKS, st.integers(1, 12))
def test_both_sides_compute_the_same_links(heads: int, p_ranks: int, d_ranks: int, num_layers: int) -> None:
    tensors = tuple(tensor(1 if layer % 3 == 2 else heads, layer) for layer in range(num_layers))

    from_p = {(p, d) for p in range(p_ranks) for d in receivers_of(tensors, Rank(p, p_ranks), d_ranks)}
    from_d = {(p, d) for d in range(d_ranks) for p in Senders(tensors, Rank(d, d_ranks)).of(p_ranks)}

    assert from_p == from_d
    assert {d for _, d in from_d} == set(range(d_ranks))


@given(st.integers(1, 8), st.integers(1, 3))
def test_equal_ranks_are_linked_one_to_one(heads: int, times: int) -> None:
    ranks = heads * times

    for d in range(ranks):
        assert [*Senders((tensor(heads),), Rank(d, ranks)).of(ranks)] == [d]


def test_holders_of_one_head_take_turns_over_the_layers() -> None:
    loads = Counter(
        p
        for layer in range(60)
        for p in range(4)
        for d in range(2)
        if heads_between(tensor(1, layer), Rank(p, 4), Rank(d, 2)) == Heads(0, 1)
    )

    assert loads == {0: 30, 1: 30, 2: 30, 3: 30}


def test_ranks_beyond_the_heads_share_out_the_receivers() -> None:
    targets = [receivers_of((tensor(2),), Rank(p, 4), 8) for p in range(4)]

    assert targets == [(0, 1), (2, 3), (4, 5), (6, 7)]
