"""Requests arrive at the configured rate and burstiness."""

import math
import random
import statistics
from itertools import pairwise

import pytest

from pdserve.bench.load.arrivals import arrival_times
from wire.errors import ConfigError


def intervals(count: int, rate: float, burstiness: float) -> list[float]:
    times = arrival_times(count, rate, burstiness, random.Random(7))
    return [after - before for before, after in pairwise([0.0, *times])]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_waits_are_gamma_distributed(burstiness: float) -> None:
    between = intervals(20_000, 5.0, burstiness)

    assert statistics.fmean(between) == pytest.approx(1 / 5.0, rel=1e-9)
    # A gamma distribution of shape k has a standard deviation of mean / sqrt(k).
    assert statistics.pstdev(between) == pytest.approx(0.2 / math.sqrt(burstiness), rel=0.05)
    assert min(between) >= 0


def test_one_in_e_poisson_waits_is_above_the_mean() -> None:
    between = intervals(20_000, 3.0, 1.0)
    assert sum(wait > 1 / 3 for wait in between) / 20_000 == pytest.approx(math.exp(-1), abs=0.01)


def test_infinite_rate_is_all_at_once_infinite_burstiness_regular() -> None:
    assert arrival_times(3, math.inf, 1.0, random.Random(0)) == [0.0, 0.0, 0.0]
    assert arrival_times(3, 2.0, math.inf, random.Random(0)) == [0.5, 1.0, 1.5]


def test_the_last_arrival_follows_from_the_rate() -> None:
    assert arrival_times(40, 3.0, 1.0, random.Random(1))[-1] == pytest.approx(40 / 3.0)


def test_a_seed_repeats_the_arrivals() -> None:
    assert arrival_times(9, 3.0, 1.0, random.Random(1)) == arrival_times(9, 3.0, 1.0, random.Random(1))


@pytest.mark.parametrize(("rate", "burstiness"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (math.nan, 1.0)])
def test_impossible_values_are_refused_by_value(rate: float, burstiness: float) -> None:
    with pytest.raises(ConfigError, match=f"--request-rate is {rate:g} and --burstiness is {burstiness:g}"):
        arrival_times(1, rate, burstiness, random.Random(0))
