"""What a step costs is learned from steps; limits of the chunks that follow from it are in test_batcher.py."""

import itertools
import random

import pytest

from engine.step_costs import StepCosts
from wire.step_cost import StepCost

_REAL = StepCost(base_s=0.012, sequence_s=0.0015, token_s=0.0006)


def _measure(costs: StepCosts, num_sequences: int, num_chunk_tokens: int, *, factor: float = 1.0) -> None:
    seconds = _REAL.decode_s(num_sequences) + num_chunk_tokens * _REAL.token_s
    costs.measure(num_sequences, num_chunk_tokens, factor * seconds)


def test_nothing_is_known_at_the_start() -> None:
    assert StepCosts().now == StepCost()


def test_base_and_slopes_are_learned_despite_noise() -> None:
    costs, rng = StepCosts(), random.Random(1)
    for sequences, chunk in itertools.islice(itertools.cycle([(1, 0), (4, 256), (8, 0), (3, 0), (0, 512)]), 400):
        _measure(costs, sequences, chunk, factor=rng.uniform(0.9, 1.1))

    assert costs.now.base_s == pytest.approx(_REAL.base_s, rel=0.1)
    assert costs.now.sequence_s == pytest.approx(_REAL.sequence_s, rel=0.1)
    assert costs.now.token_s == pytest.approx(_REAL.token_s, rel=0.1)


@pytest.mark.parametrize(("sequences", "chunk"), [(8, 0), (0, 256)])
def test_what_is_not_measured_any_more_is_kept(sequences: int, chunk: int) -> None:
    costs = StepCosts()
    for _ in range(100):
        for known in ((1, 0), (8, 0), (0, 256)):
            _measure(costs, *known)
    for _ in range(1000):
        _measure(costs, sequences, chunk)

    assert costs.now.decode_s(4) == pytest.approx(_REAL.decode_s(4), rel=0.05)
    assert costs.now.token_s == pytest.approx(_REAL.token_s, rel=0.05)


def test_an_instance_that_only_prefills_knows_its_chunks() -> None:
    costs = StepCosts()
    _measure(costs, 0, 512)

    assert costs.now.decode_s(8) == 0.0
    assert costs.now.token_s == pytest.approx((0.012 + 512 * 0.0006) / 512)


def test_a_step_in_which_the_machine_stood_still_counts_little() -> None:
    costs = StepCosts()
    for sequences in [*range(1, 9)] * 10:
        _measure(costs, sequences, 0)
    costs.measure(4, 0, 60.0)

    assert costs.now.decode_s(4) < 1.2 * _REAL.decode_s(4)


def test_a_machine_that_becomes_slower_is_learned_again() -> None:
    costs = StepCosts()
    for factor, sequences in itertools.product((1.0, 3.0), [*range(1, 9)] * 40):
        _measure(costs, sequences, 0, factor=factor)

    assert costs.now.decode_s(4) == pytest.approx(3 * _REAL.decode_s(4), rel=0.05)
