"""Compute how many instances should prefill and how many decode, from the demand and the cost of steps. Pure.

    a prompt takes   its tokens x token_s / (1 - share of the prefill instances' time in use)
                     + its outputs x (base_s + sequence_s x sequences on each decode instance)

A split that cannot keep up is worse than any that can. Of two that cannot, the one with the smaller overload is better.
"""

import math
from dataclasses import dataclass

from wire.step_cost import StepCost

_WORTH_CHANGE = 0.8
"""A split is better if it takes less than this share of the current one's time: running streams take time to end."""
_OVERLOADED_S = 1e6


@dataclass(frozen=True, slots=True)
class Demand:
    """What clients request of all instances together: prompts, their uncached tokens and outputs, each per second."""

    prompts: float = 0.0
    prompt_tokens: float = 0.0
    outputs: float = 0.0

    def moved_to(self, other: "Demand", share: float) -> "Demand":
        """Return the demand moved towards another one by a share of their distance: a running average."""
        return Demand(
            self.prompts + share * (other.prompts - self.prompts),
            self.prompt_tokens + share * (other.prompt_tokens - self.prompt_tokens),
            self.outputs + share * (other.outputs - self.outputs),
        )


def seconds_of_prompt(
    demand: Demand, cost: StepCost, num_prefill: int, num_decode: int, max_num_seqs: int
) -> float:  # fmt: skip
    """Return how long an average prompt takes with this split; a huge number if the split cannot keep up."""
    busy = demand.prompt_tokens * cost.token_s / num_prefill
    rate, most = demand.outputs / num_decode, max_num_seqs / cost.decode_s(max_num_seqs)
    overload = max(busy, rate / most)
    if overload >= 1:
        return _OVERLOADED_S * overload
    prompts = max(demand.prompts, 1e-9)
    streams = rate * cost.base_s / (1 - rate * cost.sequence_s)
    first_s = demand.prompt_tokens / prompts * cost.token_s / (1 - busy)
    return first_s + demand.outputs / prompts * cost.decode_s(streams)


def better_split(demand: Demand, cost: StepCost, num_prefill: int, num_decode: int, max_num_seqs: int) -> int:
    """Return how many prefill instances to add now (negative: to remove): half of those that the best split needs."""
    if not (cost.token_s and cost.base_s and demand.prompts):
        return 0
    num = num_prefill + num_decode
    seconds = {k: seconds_of_prompt(demand, cost, k, num - k, max_num_seqs) for k in range(1, num)}
    best = min(seconds, key=seconds.__getitem__)
    if seconds[best] >= _WORTH_CHANGE * seconds[num_prefill]:
        return 0
    return math.trunc((best - num_prefill) / 2) or (1 if best > num_prefill else -1)
