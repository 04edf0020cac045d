"""When requests arrive: all at once, or at a rate with gamma-distributed waits between them."""

import math
import random
from itertools import accumulate

from wire.errors import ConfigError


def arrival_times(count: int, rate: float, burstiness: float, numbers: random.Random) -> list[float]:
    """Return when each of `count` requests is due, in seconds from the start; all at 0 if `rate` is infinite.

    Waits are gamma-distributed with shape `burstiness`: 1 is a Poisson process, less is burstier, infinity is regular.
    The last request is due at `count / rate` exactly, as in vLLM's `bench serve`. Raises ConfigError.
    """
    if not rate > 0 or not burstiness > 0:
        raise ConfigError(f"--request-rate is {rate:g} and --burstiness is {burstiness:g}: both must be more than 0")
    if math.isinf(rate):
        return [0.0] * count
    if math.isinf(burstiness):
        return [(i + 1) / rate for i in range(count)]
    sums = list(accumulate(numbers.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(count)))
    if not sums or not sums[-1] > 0:
        return [count / rate] * count
    return [each * (count / rate) / sums[-1] for each in sums]
