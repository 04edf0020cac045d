"""An instance that fails every prompt is left after one try: the second goes to a pair that shares nothing with it."""

import pytest

from scheduler.load.loads import InstanceLoad, PromptFacts
from scheduler.placement import place
from tests.scheduler.fake_cluster import FakeCluster, collect, expected, request
from tests.scheduler.virtual_time import virtual
from wire.types import Role

PROMPT = (5, 6, 7)


def _load(index: int, role: Role, blocks_free: int = 100) -> InstanceLoad:
    return InstanceLoad(index, f"{role}-{index}", role, 0, 512, 100, blocks_free, 16, 0, 0, 8)


def _placed_pair(*loads: InstanceLoad, avoid: set[tuple[int | None, int]]) -> tuple[int | None, int] | None:
    plan = place(loads, PromptFacts(20, 8, avoid=frozenset(avoid)))
    return None if plan is None else plan.pair


@pytest.mark.parametrize("victim", [0, 2])
@virtual
async def test_an_instance_that_fails_every_prompt_is_replaced(victim: int) -> None:
    async with FakeCluster("PPDD").serving() as cluster:
        cluster.instances[0].behaviour.fail_handoffs = 9 if victim == 0 else 0
        cluster.instances[2].behaviour.refuse += ["InternalError"] * (9 if victim == 2 else 0)

        answer = await collect(cluster.control.dispatch, request(PROMPT))

        assert answer.tokens == {(0, 0): expected(PROMPT, 4)}
        assert cluster.control.dispatch.ledger.retried_prompts == 1
        assert cluster.blocks_used == [0, 0, 0, 0]


def test_the_next_pair_shares_no_instance_with_one_that_failed() -> None:
    instances = [_load(0, Role.PREFILL), _load(1, Role.PREFILL), _load(2, Role.DECODE), _load(3, Role.DECODE)]

    assert _placed_pair(*instances, avoid={(0, 2)}) == (1, 3)


def test_it_waits_for_such_a_pair_while_one_lives() -> None:
    busy = [_load(0, Role.PREFILL), _load(1, Role.PREFILL), _load(2, Role.DECODE), _load(3, Role.DECODE, blocks_free=0)]

    assert _placed_pair(*busy, avoid={(0, 2)}) is None


def test_without_such_a_pair_one_that_shares_an_instance_is_used() -> None:
    assert _placed_pair(_load(0, Role.PREFILL), _load(2, Role.DECODE), _load(3, Role.DECODE), avoid={(0, 2)}) == (0, 3)


def test_a_combined_instance_counts_only_its_own_failures() -> None:
    instances = [_load(0, Role.COMBINED), _load(1, Role.COMBINED), _load(2, Role.PREFILL), _load(3, Role.DECODE)]

    assert _placed_pair(*instances, avoid={(None, 0)}) == (None, 1)
