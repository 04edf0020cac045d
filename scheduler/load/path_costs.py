"""What a path costs a prompt and the other streams, in seconds, from measured step costs. Pure.

first token   the steps for all prompt tokens assigned to the instance, this prompt's tokens last, in chunks that keep
              the gap limit
the rest      one step of the decoding instance for each further token
delay         how much longer each stream and each waiting prompt waits because of this prompt, added up
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from scheduler.load.loads import InstanceLoad, PromptFacts
from wire.step_cost import StepCost
from wire.types import Role

_LEAST_SLICE = 16


@dataclass(frozen=True, slots=True)
class PathCost:
    """Expected seconds until the first token, from it to the last, and of delay for all others together."""

    first_token_s: float
    rest_s: float
    delay_s: float

    @property
    def total_s(self) -> float:
        """What placement compares: seconds of the prompt and seconds of delay for others count the same."""
        return self.first_token_s + self.rest_s + self.delay_s


class Expected(NamedTuple):
    """Seconds to a first token: under the current load, and on an idle cluster."""

    now_s: float
    idle_s: float


def cost_of_path(
    start: InstanceLoad, end: InstanceLoad, prompt: PromptFacts, loads: Sequence[InstanceLoad], hand_off_s: float
) -> PathCost | None:
    """Return the cost of computing on `start` and decoding on `end`, which may be the same instance.

    `hand_off_s` is what a hand-off takes in addition to computing. None while no instance has measured its steps.
    """
    on_start, on_end = (known_cost(one, loads) for one in (start, end))
    if not on_start.token_s or not on_end.base_s:
        return None
    length = max(1, prompt.num_tokens - prompt.known.get(start.index, 0))
    first_s = _steps_s(start, on_start, start.outstanding_tokens + length, start.streams)
    delay_s = start.streams * length * on_start.token_s
    num_outputs, width = max(0.0, prompt.expected_outputs - 1), prompt.num_sequences
    rest_s = num_outputs * on_end.decode_s(end.streams + width)
    delay_s += end.streams * num_outputs * width * on_end.sequence_s
    if start is end:
        delay_s += _delay_of_waiting(start, on_start, prompt, num_outputs)
    else:
        rest_s += hand_off_s + min(end.outstanding_tokens * on_end.token_s, rest_s)
        delay_s += prompt.num_behind / 2 * first_s  # meanwhile only one of the two computes prompts
    return PathCost(first_s, rest_s, delay_s)


def first_token_s(loads: Sequence[InstanceLoad], waiting: int, num_tokens: int, *, everywhere: bool) -> Expected:
    """Return when a prompt of `num_tokens` will have its first token, behind `waiting` tokens of others.

    All instances that compute prompts share these tokens, after those they already have to compute; decode instances
    only if prompts may be computed `everywhere`. Zeros while no step with a chunk was measured.
    """
    computing = [load for load in loads if load.role is not Role.DECODE or everywhere]
    costs = [known_cost(load, loads) for load in computing]
    if not costs or not all(cost.token_s for cost in costs):
        return Expected(0.0, 0.0)
    rate = idle_rate = 0.0
    for load, cost in zip(computing, costs, strict=True):
        size = _chunk_size(load, cost, load.streams)
        rate += size / (cost.decode_s(load.streams) + size * cost.token_s)
        idle_rate += 1 / cost.token_s
    outstanding = sum(load.outstanding_tokens for load in computing)
    return Expected((outstanding + waiting + num_tokens) / rate, num_tokens / idle_rate)


def known_cost(load: InstanceLoad, loads: Sequence[InstanceLoad]) -> StepCost:
    """Return an instance's measured cost; a part that it has not measured is taken from another instance."""
    cost = load.cost
    if not cost.token_s:
        token_s = next((one.cost.token_s for one in loads if one.cost.token_s), 0.0)
        cost = replace(cost, token_s=token_s)
    if not cost.base_s:
        other = next((one.cost for one in loads if one.cost.base_s), cost)
        cost = StepCost(other.base_s, other.sequence_s, cost.token_s)
    return cost


def _steps_s(load: InstanceLoad, cost: StepCost, num_tokens: int, streams: int) -> float:
    """Return the seconds of the steps that compute `num_tokens` prompt tokens while `streams` streams are decoded."""
    num_steps = math.ceil(num_tokens / _chunk_size(load, cost, streams))
    return num_steps * cost.decode_s(streams) + num_tokens * cost.token_s


def _chunk_size(load: InstanceLoad, cost: StepCost, streams: int) -> float:
    """Return the tokens of a chunk while `streams` streams are decoded, as engine/batcher.py limits it."""
    largest = float(load.prefill_chunk_size)
    if not streams:
        return largest
    gap_limit_s, least = load.gap_limit_s, _LEAST_SLICE
    if load.arriving:
        gap_limit_s, least = gap_limit_s / 2, least // 2
    return min(largest, cost.chunk_within(max(gap_limit_s, 1.1 * cost.decode_s(streams)), streams, least))


def _delay_of_waiting(load: InstanceLoad, cost: StepCost, prompt: PromptFacts, num_outputs: float) -> float:
    """Return how much later the waiting prompts get their first tokens if one more stream is decoded beside them."""
    num_tokens = prompt.tokens_behind + load.outstanding_tokens
    if not prompt.num_behind or not num_tokens:
        return 0.0
    without_s = _steps_s(load, cost, num_tokens, load.streams)
    with_s = _steps_s(load, cost, num_tokens, load.streams + prompt.num_sequences)
    share = min(1.0, num_outputs * cost.decode_s(load.streams + 1) / with_s)  # the part of `with_s` in which it decodes
    return prompt.num_behind / 2 * share * (with_s - without_s)
