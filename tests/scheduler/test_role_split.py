"""How many instances prefill and how many decode, by demand and measured costs."""

import pytest

from scheduler.load.role_split import Demand, better_split, seconds_of_prompt
from wire.step_cost import NO_COST, StepCost

COST = StepCost(0.01, 0.001, 0.001)
IDLE = Demand()


@pytest.mark.parametrize(
    ("demand", "split", "change"),
    [
        (Demand(1.0, 100, 50), (2, 2), 0),  # both sides have time left
        (Demand(2.0, 1900, 32), (2, 2), 1),  # 0.95 of both prefill instances
        (Demand(2.0, 1900, 32), (3, 1), 0),
        (Demand(2.0, 64, 1800), (3, 1), -1),  # more than one decode instance makes at full batches
        (Demand(2.0, 64, 1800), (1, 3), 0),
        (Demand(5.0, 5800, 32), (1, 7), 3),  # half of the way to 7 and 1
        (Demand(9.0, 90_000, 9_000), (2, 2), 1),  # nothing keeps up: nearer to the smaller overload
        (Demand(9.0, 90_000, 9_000), (3, 1), 0),
        (Demand(2.0, 1900, 32), (1, 1), 0),  # one of each stays
        (IDLE, (2, 2), 0),
    ],
)
def test_the_split_moves_towards_the_demand(demand: Demand, split: tuple[int, int], change: int) -> None:
    assert better_split(demand, COST, *split, max_num_seqs=64) == change


@pytest.mark.parametrize("cost", [NO_COST, StepCost(token_s=0.001), StepCost(base_s=0.01)])
def test_without_measured_costs_roles_stay(cost: StepCost) -> None:
    assert better_split(Demand(2.0, 1900, 32), cost, 1, 3, max_num_seqs=64) == 0


def test_a_prompt_takes_its_queue_its_tokens_and_its_steps() -> None:
    alone = seconds_of_prompt(Demand(0.001, 0.1, 0.01), COST, 1, 1, max_num_seqs=64)
    assert alone == pytest.approx(100 * 0.001 + 10 * 0.01, rel=0.01)
    half_busy = seconds_of_prompt(Demand(5.0, 500, 50), COST, 1, 1, max_num_seqs=64)
    assert half_busy == pytest.approx(2 * 100 * 0.001 + 10 * 0.01 / (1 - 0.05), rel=0.01)
