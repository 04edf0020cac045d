"""Placement is a pure function that returns a plan and its reason."""

import dataclasses
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.requirements import blocks_needed
from scheduler.load.instance_order import InstanceOrder
from scheduler.load.loads import HeldPrompts, InstanceLoad, PromptFacts, link_share
from scheduler.load.obstacles import obstacles
from scheduler.load.path_costs import first_token_s
from scheduler.placement import has_room, max_output, place, why_waiting
from wire.errors import NeverFits, Unavailable
from wire.step_cost import NO_COST, StepCost
from wire.types import Role


def load(index: int, role: Role, **changes: Any) -> InstanceLoad:
    idle = InstanceLoad(
        index, f"{role}-{index}", role, outstanding_tokens=0, prefill_chunk_size=512, blocks_total=100,
        blocks_free=100, block_size=16, sequences=0, waiting=0, max_num_seqs=8,
    )  # fmt: skip
    return dataclasses.replace(idle, **changes)


def prefill(index: int, **changes: Any) -> InstanceLoad:
    return load(index, Role.PREFILL, **changes)


def decode(index: int, **changes: Any) -> InstanceLoad:
    return load(index, Role.DECODE, **changes)


def pair(*loads: InstanceLoad, **facts: Any) -> tuple[int | None, int] | None:
    plan = place(loads, PromptFacts(**{"num_tokens": 100, "max_tokens": 50, **facts}))
    return None if plan is None else plan.pair


def test_the_least_loaded_prefill_and_decode_are_picked() -> None:
    loads = [prefill(0, outstanding_tokens=9), prefill(1), decode(2, sequences=2), decode(3, sequences=1)]

    assert pair(*loads) == (1, 3)


def drawn(*loads: InstanceLoad, **facts: Any) -> set[object]:
    """Return the pairs of 400 plans; each must come about as often as the others."""
    prompt = PromptFacts(**{"num_tokens": 100, "max_tokens": 50, **facts})
    plans = [place(loads, prompt, rng=random.Random(seed)) for seed in range(400)]
    counts = Counter(plan.pair for plan in plans if plan is not None)
    assert min(counts.values()) > 0.7 * 400 / len(counts)
    return set(counts)


@pytest.mark.parametrize(
    ("loads", "facts", "pairs"),
    [
        ([], {}, {(1, 3), (0, 3), (1, 2), (0, 2)}),
        ([decode(4, sequences=1), prefill(5, outstanding_tokens=1)], {}, {(1, 3), (0, 3), (1, 2), (0, 2)}),
        ([decode(4, blocks_free=0)], {}, {(1, 3), (0, 3), (1, 2), (0, 2)}),
        ([], {"known": {0: 64, 2: 64}}, {(0, 2)}),
        ([load(4, Role.COMBINED)], {"max_tokens": 1}, {(None, 0), (None, 1), (None, 4)}),
    ],
)
def test_ties_are_broken_at_random(loads: list[InstanceLoad], facts: dict[str, Any], pairs: set[object]) -> None:
    """By a source that is passed; without one they go to the first in the table."""
    tied = [decode(3), decode(2), prefill(1), prefill(0)]

    assert drawn(*loads, *tied, **facts) == pairs
    assert pair(*tied) == (1, 3)
    assert pair(load(2, Role.COMBINED), prefill(0), decode(1)) == (None, 2)


@pytest.mark.parametrize("seed", range(40))
def test_instances_come_in_the_order_of_a_full_sort(seed: int) -> None:
    """Of those that are equal, the source of chance draws the first."""
    draw = random.Random(seed)
    loads = [
        load(
            index, draw.choice(list(Role)), outstanding_tokens=draw.randrange(0, 200, 50), sequences=draw.randrange(4),
            blocks_free=draw.randrange(4, 14), block_size=draw.choice((16, 32)),
        )
        for index in range(draw.randrange(9))
    ]  # fmt: skip
    known = {one.index: draw.randrange(0, 100, 20) for one in loads if seed % 2 and draw.random() < 0.5}
    shared = {index: tokens for index, tokens in known.items() if draw.random() < 0.5}
    facts = PromptFacts(100, 50, known=known, shared=shared)

    def tokens(one: InstanceLoad) -> int:
        return one.outstanding_tokens - 2 * known.get(one.index, 0)

    def rank(one: InstanceLoad) -> tuple[bool, float]:
        lacks = one.blocks_for_all(facts) - one.blocks_shared(facts) > one.blocks_free
        return lacks, one.sequences - 4 * known.get(one.index, 0) / 100

    order, drawing = InstanceOrder(loads, facts), InstanceOrder(loads, facts, draw)
    starts = [one for one in loads if one.role is not Role.DECODE]
    ends = [one for one in loads if one.role is Role.DECODE]
    for _ in range(2):  # the second time what was sorted is kept
        assert list(order.starts) == sorted(starts, key=tokens)
        assert list(order.ends) == sorted(ends, key=rank)
    assert list(map(tokens, drawing.starts)) == sorted(map(tokens, starts))
    assert list(map(rank, drawing.ends)) == sorted(map(rank, ends))
    assert {one.name for one in (*drawing.starts, *drawing.ends)} == {one.name for one in loads}


def test_waits_while_every_prefill_has_more_than_a_step_outstanding() -> None:
    assert pair(prefill(0, outstanding_tokens=512), decode(1)) == (0, 1)
    assert pair(prefill(0, outstanding_tokens=513), decode(1)) is None
    assert pair(prefill(0, outstanding_tokens=900, encoding_tokens=400), decode(1)) == (0, 1)
    assert (
        pair(prefill(0, outstanding_tokens=900), prefill(1, outstanding_tokens=900, encoding_tokens=300), decode(2))
        is None
    )


def test_a_cached_token_outweighs_two_outstanding_ones() -> None:
    loads = [prefill(0), prefill(1, outstanding_tokens=60), decode(2)]

    assert pair(*loads, known={1: 31}) == (1, 2)
    assert pair(*loads, known={1: 29}) == (0, 2)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.COMBINED])
def test_a_prompt_waits_for_the_next_step_where_it_is_cached(role: Role) -> None:
    def placed(known: int, end: InstanceLoad = decode(2), **changes: Any) -> tuple[int | None, int] | None:
        busy = load(1, role, outstanding_tokens=513, **changes)
        return pair(load(0, role), busy, *([end] if role is Role.PREFILL else []), num_tokens=900, known={1: known})

    free = (0, 2) if role is Role.PREFILL else (None, 0)
    assert placed(896) is None
    assert placed(256) == free
    assert placed(896, is_suspect=True) == free
    assert placed(896, no_transport_to={1, 2}) == free
    assert placed(896, blocks_free=0) == free

    busy = load(1, role, outstanding_tokens=513)
    reason = why_waiting([load(0, role), busy, decode(2)], PromptFacts(900, 50, known={1: 896}))
    assert reason == f"{busy.name} has 513 prompt tokens to compute (limit 512, its next step)"


def test_decode_with_the_prefix_beats_slightly_less_load() -> None:
    assert pair(prefill(0), decode(1), decode(2, sequences=3), known={2: 96}) == (0, 2)
    assert pair(prefill(0), decode(1), decode(2, sequences=4), known={2: 96}) == (0, 1)
    assert pair(prefill(0), decode(1), decode(2, sequences=2), known={2: 32}) == (0, 1)
    assert pair(prefill(0), decode(1, sequences=1), decode(2, sequences=2), known={1: 64, 2: 64}) == (0, 1)


def test_room_and_failures_count_before_cached_prefixes() -> None:
    loads = [prefill(0), decode(1), decode(2, blocks_free=6)]

    assert pair(*loads, known={2: 96}) == (0, 1)
    assert pair(prefill(0), decode(1), decode(2), known={2: 96}, avoid=frozenset({(0, 2)})) == (0, 1)


def test_shared_blocks_in_use_need_not_be_free() -> None:
    full = decode(1, blocks_free=3)

    assert pair(prefill(0), full) is None
    assert pair(prefill(0), full, shared={1: 64}) == (0, 1)
    assert pair(prefill(0), decode(1, blocks_free=2), shared={1: 64}) is None
    assert pair(load(0, Role.COMBINED, blocks_free=3), shared={0: 64}) == (None, 0)
    assert pair(prefill(0, blocks_free=6), decode(1), shared={1: 64}) is None


COST = StepCost(base_s=0.012, sequence_s=0.0015, token_s=0.0006)
"""Of a small model on one core: 166 ms for a prompt of 256 tokens, 14 ms for a step of one stream, 60 ms with 32."""


def measured(one: InstanceLoad, **changes: Any) -> InstanceLoad:
    return dataclasses.replace(one, **{"cost": COST, "max_num_seqs": 64, "gap_limit_s": 0.1, **changes})


@pytest.mark.parametrize(
    ("busy_prefill", "busy_decode", "facts", "chosen"),
    [
        ({}, {}, {}, (0, 1)),  # all the same
        ({}, {"streams": 1}, {}, (None, 0)),
        ({"streams": 20}, {}, {"num_tokens": 1024, "known": {0: 1008}}, (0, 1)),  # nearly cached, beside many streams
        ({}, {"streams": 8}, {}, (None, 0)),  # a step of 9 is dearer than one of 1
        ({}, {"streams": 8}, {"num_behind": 60, "tokens_behind": 60 * 256}, (None, 0)),  # both compute those
        ({"outstanding_tokens": 500}, {}, {}, (None, 1)),  # D has nothing to do
        ({"outstanding_tokens": 500}, {"streams": 8}, {"num_tokens": 16}, (None, 0)),
        (  # a short one disturbs little
            {"outstanding_tokens": 500, "streams": 8}, {"streams": 8}, {"num_tokens": 16, "expected_outputs": 8.0},
            (None, 1),
        ),
        ({"outstanding_tokens": 500, "streams": 20}, {"streams": 20}, {}, (None, 1)),
        ({"outstanding_tokens": 600, "streams": 20}, {"streams": 20}, {}, (None, 1)),
        ({"outstanding_tokens": 600, "streams": 20}, {"streams": 20}, {"known": {0: 240}}, None),  # waits for P's next
        ({"outstanding_tokens": 600, "streams": 20}, {"streams": 20}, {"known": {1: 240}}, (None, 1)),  # nearly cached
        ({"outstanding_tokens": 500}, {}, {"has_images": True}, (0, 1)),  # D encodes none
        ({"outstanding_tokens": 500}, {}, {"expected_outputs": 0}, (0, 1)),  # not to be compared
        ({"outstanding_tokens": 500}, {}, {"avoid": frozenset({(None, 1)})}, (0, 1)),  # it failed there
        ({}, {"blocks_free": 0}, {}, (None, 0)),  # D is full
        ({"blocks_free": 0}, {}, {}, (None, 1)),
        ({"blocks_free": 18}, {"blocks_free": 0}, {}, None),  # P alone would have no room for its output
        ({"is_suspect": True}, {}, {}, (None, 1)),
        ({"path": "prefill-first"}, {"path": "prefill-first", "streams": 30}, {}, (0, 1)),  # workers of another engine
    ],
)  # fmt: skip
def test_the_path_that_costs_all_streams_least_is_taken(
    busy_prefill: dict[str, Any], busy_decode: dict[str, Any], facts: dict[str, Any], chosen: object
) -> None:
    loads = [measured(prefill(0), **busy_prefill), measured(decode(1), **busy_decode)]
    given = {"num_tokens": 256, "max_tokens": 64, "expected_outputs": 64.0, **facts}

    assert pair(*loads, **given) == chosen


@pytest.mark.parametrize(
    ("busy_prefill", "pairs"),
    [
        ({}, {(0, 1), (None, 0), (None, 1)}),  # the same in every part
        ({"outstanding_tokens": 20}, {(None, 0), (None, 1)}),  # of the two local ones, 12 ms of 1.1 s are no difference
        ({"outstanding_tokens": 60}, {(None, 1)}),
    ],
)
def test_near_ties_of_local_paths_are_broken_at_random(busy_prefill: dict[str, Any], pairs: set[object]) -> None:
    """A hand-off has to be cheapest."""
    loads = [measured(prefill(0), **busy_prefill), measured(decode(1))]

    assert drawn(*loads, num_tokens=256, max_tokens=64, expected_outputs=64.0) == pairs


@pytest.mark.parametrize(
    ("loads", "everywhere", "expected"),
    [
        ([measured(prefill(0)), measured(decode(1))], False, (1000 / (512 / 0.3192), 0.36)),
        ([measured(prefill(0)), measured(decode(1))], True, (1000 / (2 * 512 / 0.3192), 0.18)),
        ([measured(prefill(0), outstanding_tokens=1000), measured(decode(1))], False, (2000 / (512 / 0.3192), 0.36)),
        ([measured(prefill(0), streams=8), measured(decode(1))], False, (1000 / (126 / 0.0996), 0.36)),  # chunks of 126
        ([measured(prefill(0), cost=NO_COST), measured(decode(1), cost=NO_COST)], False, (0.0, 0.0)),
        ([measured(decode(1))], False, (0.0, 0.0)),
    ],
)
def test_the_first_token_is_expected_after_all_that_waits(
    loads: list[InstanceLoad], everywhere: bool, expected: tuple[float, float]
) -> None:
    assert first_token_s(loads, 400, 600, everywhere=everywhere) == pytest.approx(expected)


def test_without_a_measured_step_every_prompt_is_handed_off() -> None:
    loads = [measured(prefill(0), cost=NO_COST), measured(decode(1), cost=NO_COST, streams=30)]

    assert pair(*loads, expected_outputs=64.0) == (0, 1)


def test_what_an_instance_has_not_measured_is_another_ones() -> None:
    loads = [
        measured(prefill(0), cost=dataclasses.replace(NO_COST, token_s=COST.token_s)),
        measured(decode(1), cost=dataclasses.replace(COST, token_s=0.0), streams=30),
    ]

    assert pair(*loads, num_tokens=256, max_tokens=64, expected_outputs=64.0) == (None, 0)


def test_the_reason_compares_the_paths() -> None:
    plan = place(
        [measured(prefill(0)), measured(decode(1))], PromptFacts(256, 64, expected_outputs=64.0), hand_off_s=0.04
    )

    assert plan is not None
    assert plan.reason.endswith("hand-off 1.056 s, prefill instance alone 1.016 s, decode instance alone 1.016 s")


def test_the_reason_names_the_cached_tokens() -> None:
    plan = place([prefill(0), decode(1)], PromptFacts(100, 50, known={0: 64, 1: 96}))

    assert plan is not None
    assert "prefill-0: outstanding tokens: 0, 64 of 100 prompt tokens cached;" in plan.reason
    assert plan.reason.endswith("room for the whole sequence, 96 of 100 prompt tokens cached")


def test_room_for_the_whole_sequence_comes_before_fewer_sequences() -> None:
    assert pair(prefill(0), decode(1, blocks_free=8), decode(2, sequences=5)) == (0, 2)


def test_room_for_the_prompt_is_enough_where_none_has_more() -> None:
    assert pair(prefill(0), decode(1, blocks_free=7)) == (0, 1)
    assert pair(prefill(0), decode(1, blocks_free=6)) is None


def test_waits_where_decode_runs_all_the_sequences_it_can() -> None:
    assert pair(prefill(0), decode(1, sequences=8)) is None
    assert pair(prefill(0), decode(1, sequences=7), num_sequences=1) == (0, 1)


def test_prompts_wait_while_decode_has_preempted_sequences() -> None:
    assert pair(prefill(0), decode(1, waiting=1)) is None


def test_combined_instance_serves_alone() -> None:
    plan = place([load(0, Role.COMBINED)], PromptFacts(100, 50))

    assert plan is not None
    assert (plan.path, plan.pair) == ("local", (None, 0))
    assert "combined-0" in plan.reason


def test_combined_instance_takes_over_when_decode_is_full() -> None:
    assert pair(prefill(0), decode(1, blocks_free=0), load(2, Role.COMBINED, outstanding_tokens=5)) == (None, 2)


def test_failed_pairs_are_avoided_while_another_lives() -> None:
    loads = [prefill(0), decode(1), decode(2)]

    assert pair(*loads, avoid=frozenset({(0, 1)})) == (0, 2)
    assert pair(prefill(0), decode(1), decode(2, blocks_free=0), avoid=frozenset({(0, 1)})) is None


def test_a_failed_pair_is_used_again_if_no_other_lives() -> None:
    assert pair(prefill(0), decode(1), avoid=frozenset({(0, 1)})) == (0, 1)


def test_no_path_is_unavailable() -> None:
    with pytest.raises(Unavailable):
        pair(prefill(0), prefill(1))


def test_a_prompt_larger_than_every_pool_is_refused_with_numbers() -> None:
    with pytest.raises(NeverFits, match=r"1601 tokens.*1600"):
        pair(prefill(0), decode(1), num_tokens=1601)


def test_output_larger_than_every_decode_pool_is_refused() -> None:
    words = r"100 prompt tokens and 4 x 400 output tokens need 110 KV blocks of 16 tokens, .* 100"

    with pytest.raises(NeverFits, match=words) as caught:
        pair(prefill(0), decode(1), max_tokens=400, num_sequences=4)
    assert caught.value.param == "max_tokens"
    with pytest.raises(NeverFits, match=words):
        pair(load(0, Role.COMBINED), max_tokens=400, num_sequences=4)
    assert pair(prefill(0, blocks_total=7, blocks_free=7), decode(1), max_tokens=1400) == (0, 1)


def test_a_prompt_goes_only_where_all_of_it_fits() -> None:
    small, large = decode(1, blocks_total=20, blocks_free=20), decode(2, blocks_free=8, sequences=5)

    assert pair(prefill(0), small, large, max_tokens=400) == (0, 2)
    assert pair(prefill(0), small, large, max_tokens=400, avoid=frozenset({(0, 2)})) == (0, 2)


def test_more_sequences_than_an_instance_runs_never_fit() -> None:
    with pytest.raises(NeverFits, match=r"needs 9 sequences at once .* limit is 8"):
        pair(prefill(0), decode(1), num_sequences=9)
    with pytest.raises(NeverFits, match=r"needs 5 sequences at once .* limit is 4"):
        pair(prefill(0, max_num_seqs=4), decode(1), num_sequences=5)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 16), st.sampled_from((1, 16, 128)))
def test_a_prompts_blocks_are_those_the_engine_needs(num_tokens: int, max_tokens: int, n: int, block_size: int) -> None:
    instance = decode(0, block_size=block_size)

    needed = instance.blocks_for_all(PromptFacts(num_tokens, max_tokens, n))
    assert needed == blocks_needed(num_tokens, [max_tokens - 1] * n, block_size)


@given(st.integers(1, 300), st.integers(1, 16), st.sampled_from((1, 16, 128)), st.integers(1, 200))
def test_the_most_output_a_pool_holds_fits_and_one_more_does_not(
    num_tokens: int, n: int, block_size: int, blocks: int
) -> None:
    loads = [decode(0, block_size=block_size, blocks_total=blocks), prefill(1, blocks_total=10**6)]

    maximum = max_output(loads, num_tokens, n)
    assert maximum is not None
    assert maximum == 1 or loads[0].blocks_for_all(PromptFacts(num_tokens, maximum, n)) <= blocks
    assert loads[0].blocks_for_all(PromptFacts(num_tokens, maximum + 1, n)) > blocks


def test_the_most_output_is_that_of_pools_a_prompt_can_reach() -> None:
    unlinked = prefill(0, no_transport_to={2: "no KV transport in common"})
    ends = [decode(1), decode(2, blocks_total=1000, blocks_free=1000)]

    maximum = max_output([unlinked, *ends], 100, 1)
    assert maximum == max_output([unlinked, ends[0]], 100, 1) == 1501
    assert pair(unlinked, *ends, max_tokens=maximum) == (0, 1)
    assert max_output([unlinked, *ends, prefill(3)], 100, 1) == 15901
    assert max_output([unlinked, *ends, load(4, Role.COMBINED, blocks_total=200)], 100, 1) == 3101


def test_the_most_output_is_that_of_pairs_that_can_start_the_prompt() -> None:
    small = prefill(0, blocks_total=10)
    unlinked, large, end = (
        prefill(1, no_transport_to={2: "no KV transport in common"}),
        decode(2, blocks_total=1000),
        decode(3),
    )
    loads = [small, unlinked, large, end]

    maximum = max_output(loads, 500, 1)

    assert maximum == max_output([unlinked, end], 500, 1)
    assert pair(*loads, num_tokens=500, max_tokens=maximum) == (1, 3)
    narrow = decode(4, blocks_total=1000, max_num_seqs=1)
    assert max_output([unlinked, end, narrow], 100, 2) == max_output([unlinked, end], 100, 2)


def test_without_a_path_nothing_bounds_the_output() -> None:
    assert max_output([], 10, 1) is None
    assert max_output([prefill(0, no_transport_to={1: "no KV transport in common"}), decode(1)], 10, 1) is None


def test_prefill_holding_half_its_pool_for_receivers_is_full() -> None:
    below, full = {2: HeldPrompts(1, 400), 3: HeldPrompts(1, 399)}, {2: HeldPrompts(1, 400), 3: HeldPrompts(1, 400)}

    assert pair(prefill(0, held_for=below), decode(2), decode(3)) == (0, 3)
    assert pair(prefill(0, held_for=full), decode(2), decode(3)) is None
    assert pair(prefill(0, held_for=full), prefill(1), decode(2), decode(3)) == (1, 2)


def test_a_link_holding_its_share_gets_no_more_prompts() -> None:
    slow = prefill(
        0, held_for={2: HeldPrompts(1, 400)}
    )  # of 1,600 tokens half may be held, a half of that by each link

    assert pair(slow, decode(2), decode(3)) == (0, 3)
    assert pair(slow, decode(2)) == (0, 2)
    assert pair(slow, prefill(1, outstanding_tokens=5), decode(2), decode(3, blocks_free=0)) == (1, 2)


def test_a_link_holds_at_most_its_share_of_the_receivers_sequences() -> None:
    many = prefill(0, max_num_seqs=64, held_for={1: HeldPrompts(4, 64)})

    assert pair(many, decode(1, max_num_seqs=8)) is None
    assert pair(many, decode(1, max_num_seqs=10)) == (0, 1)


@pytest.mark.parametrize(
    ("loads", "words"),
    [
        ([prefill(0, outstanding_tokens=900), decode(1)], "prefill-0 has 900 prompt tokens to compute (limit 512"),
        ([prefill(0, blocks_free=3), decode(1)], "prefill-0 has 3 of 100 KV blocks free, but 7 are needed"),
        ([prefill(0), decode(1, blocks_free=-1)], "decode-1 has 0 of 100 KV blocks free, but 7 are needed"),
        ([prefill(0), decode(1, sequences=8)], "decode-1 has 8 sequences and 1 would be added (limit 8)"),
        ([prefill(0), decode(1, waiting=2)], "decode-1 has 2 prompts waiting for KV blocks"),
        (
            [prefill(0, held_for={9: HeldPrompts(1, 800)}), decode(1)],
            "holds 800 tokens of KV for its receivers (limit 800)",
        ),
        ([prefill(0, held_for={1: HeldPrompts(4, 80)}), decode(1)], "has 4 sequences to send (limit 4)"),
        ([prefill(0, held_for={1: HeldPrompts(1, 300)}), decode(1), decode(2, blocks_total=50)], ""),
        ([prefill(0), decode(1)], ""),
        ([], ""),
    ],
)  # fmt: skip
def test_the_reason_for_waiting_has_the_values(loads: list[InstanceLoad], words: str) -> None:
    reported = why_waiting(loads, PromptFacts(100, 50))

    assert words in reported
    assert bool(reported) == bool(words)
    assert not loads or bool(words) == (place(loads, PromptFacts(100, 50)) is None)


def test_many_obstacles_are_summarised() -> None:
    reported = why_waiting(
        [prefill(i, outstanding_tokens=600 + i) for i in range(9)] + [decode(9)], PromptFacts(100, 50)
    )

    assert reported.count("prompt tokens to compute") == 4
    assert reported.endswith("; and 5 more")


def test_an_instance_with_a_full_next_step_has_no_room() -> None:
    assert has_room([prefill(0, outstanding_tokens=512), decode(1)], prefill_only=False)
    assert not has_room([prefill(0, outstanding_tokens=513), decode(1)], prefill_only=True)
    # no pair: each prompt has to get this error
    assert has_room([prefill(0, outstanding_tokens=513)], prefill_only=False)


def test_a_full_decode_instance_leaves_room_only_for_vectors() -> None:
    loads = [prefill(0), decode(1, sequences=8)]

    assert not has_room(loads, prefill_only=False)
    assert has_room(loads, prefill_only=True)
    assert not has_room([prefill(0, blocks_free=-1), decode(1, sequences=8)], prefill_only=True)


_loads = st.builds(
    load, st.just(0), st.sampled_from([Role.PREFILL, Role.DECODE, Role.COMBINED]),
    outstanding_tokens=st.sampled_from([0, 600]), blocks_free=st.integers(-2, 20), sequences=st.integers(6, 8),
    waiting=st.integers(0, 1), held_for=st.sampled_from([{}, {1: HeldPrompts(1, 16)}, {1: HeldPrompts(8, 1600)}]),
)  # fmt: skip


@given(st.lists(_loads, min_size=2, max_size=4), st.integers(1, 200), st.booleans(), st.booleans())
def test_no_prompt_starts_where_there_is_no_room(
    loads: list[InstanceLoad], num_tokens: int, pooled: bool, shares: bool
) -> None:
    loads = [dataclasses.replace(one, index=index) for index, one in enumerate(loads)]
    shared = {one.index: num_tokens // 64 * 64 for one in loads} if shares else {}
    prompt = PromptFacts(num_tokens, 5, pooled=pooled, known=shared, shared=shared)
    try:
        plan = place(loads, prompt)
    except (Unavailable, NeverFits):
        return

    assert plan is None or has_room(loads, prefill_only=pooled)


_any_load = st.builds(
    load, st.just(0), st.sampled_from([Role.PREFILL, Role.DECODE, Role.COMBINED]),
    outstanding_tokens=st.sampled_from([0, 100, 600]), blocks_free=st.integers(0, 40), sequences=st.integers(0, 8),
    waiting=st.sampled_from([0, 0, 1]), blocks_total=st.sampled_from([20, 100]), max_num_seqs=st.sampled_from([2, 8]),
    held_for=st.sampled_from([{}, {1: HeldPrompts(1, 16)}, {2: HeldPrompts(8, 600)}]),
    no_transport_to=st.sampled_from([{}, {1: "cut"}]),
)  # fmt: skip


@given(
    st.lists(_any_load, min_size=1, max_size=6), st.integers(1, 500), st.integers(1, 3), st.booleans(),
    st.dictionaries(st.integers(0, 5), st.sampled_from([0, 64, 128])), st.booleans(),
)  # fmt: skip
def test_the_plan_is_the_best_pair_of_all_that_are_free(
    loads: list[InstanceLoad], num_tokens: int, n: int, pooled: bool, known: dict[int, int], tried: bool
) -> None:
    """The oracle tries every pair in order; `avoid` names a pair that does not exist, and changes nothing."""
    loads = [dataclasses.replace(one, index=index) for index, one in enumerate(loads)]
    known = {index: min(held, num_tokens) for index, held in known.items()}
    prompt = PromptFacts(num_tokens, 5, n, pooled=pooled, known=known, avoid=frozenset({(77, 78)} if tried else ()))
    starts = sorted(
        (one for one in loads if one.role is not Role.DECODE),
        key=lambda one: (one.outstanding_tokens - known.get(one.index, 0), one.index),
    )
    ends = sorted(
        (one for one in loads if one.role is Role.DECODE),
        key=lambda one: (
            one.blocks_for_all(prompt) > one.blocks_free,
            one.sequences - 4 * known.get(one.index, 0) / num_tokens,
            one.index,
        ),
    )
    alone = {one.index for one in starts if pooled or one.role is Role.COMBINED}
    pairs = [(s, e) for s in starts for e in ([s] if s.index in alone else ends) if e.index not in s.no_transport_to]
    peers = [max(1, sum(one.role is role for one in loads)) for role in (Role.PREFILL, Role.DECODE)]
    fitting = [
        (s, e) for s, e in pairs
        if n <= min(s.max_num_seqs, e.max_num_seqs) and s.blocks_for(num_tokens) <= s.blocks_total
        and e.blocks_for_all(prompt) <= e.blocks_total
    ]  # fmt: skip
    free = [(s, e) for s, e in fitting if not list(obstacles(s, e, prompt, link_share(s, e, *peers)))]

    if not pairs or not fitting:
        with pytest.raises(NeverFits if pairs else Unavailable):
            place(loads, prompt)
        return
    plan = place(loads, prompt)
    assert (plan is None) == (not free)
    if plan is not None:
        start, end = free[0]
        assert (plan.prefill, plan.decode) == (None if start is end else start.index, end.index)
