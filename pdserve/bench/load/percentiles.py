"""Mean, median, standard deviation and percentiles of measured times, as in numpy."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the linearly interpolated percentile; 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True, slots=True)
class Spread:
    """The statistics of one kind of time; zeros if nothing was measured."""

    mean: float
    median: float
    std: float
    percentiles: Mapping[float, float]


def spread(values: Sequence[float], percents: Sequence[float]) -> Spread:
    """Return the statistics of `values`, in their unit; `std` is the population's."""
    percentiles = {percent: percentile(values, percent) for percent in percents}
    if not values:
        return Spread(0.0, 0.0, 0.0, percentiles)
    return Spread(statistics.fmean(values), statistics.median(values), statistics.pstdev(values), percentiles)
