"""Means, standard deviations and percentiles equal numpy's."""

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.bench.load.percentiles import percentile, spread

_TIMES = st.lists(st.floats(0, 1e6, allow_nan=False), min_size=1, max_size=60)
_PERCENTS = st.floats(0, 100, allow_nan=False)


@given(_TIMES, _PERCENTS)
def test_a_percentile_equals_numpys(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(float(numpy.percentile(values, percent)), rel=1e-9, abs=1e-6)


@given(_TIMES)
def test_the_other_figures_equal_numpys(values: list[float]) -> None:
    figures = spread(values, (50.0, 99.0))

    assert figures.mean == pytest.approx(float(numpy.mean(values)), rel=1e-9, abs=1e-6)
    assert figures.median == pytest.approx(float(numpy.median(values)), rel=1e-9, abs=1e-6)
    assert figures.std == pytest.approx(float(numpy.std(values)), rel=1e-6, abs=1e-3)
    assert figures.percentiles[50.0] == pytest.approx(figures.median, rel=1e-9, abs=1e-6)


def test_without_measurements_figures_are_zero_as_in_vllm() -> None:
    figures = spread([], (99.0,))
    assert (figures.mean, figures.median, figures.std, figures.percentiles) == (0.0, 0.0, 0.0, {99.0: 0.0})
