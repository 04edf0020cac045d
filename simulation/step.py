"""What a simulated instance's next step computes, and for how long: pure functions of its prompts."""

import dataclasses
from collections.abc import Iterable, Sequence

from engine.batcher import BatchLimits, Streams, paced, plan_step
from engine.step_costs import StepCosts
from simulation.prompt import Behaviour, SimulatedPrompt
from wire.description import InstanceDescription


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedStep:
    """The prompts that decode in a step, the number of their sequences, and the chunks with their numbers of tokens."""

    decoding: Sequence[SimulatedPrompt]
    num_decoding: int
    chunks: Sequence[tuple[SimulatedPrompt, int]]

    @property
    def num_chunk_tokens(self) -> int:
        return sum(count for _, count in self.chunks)

    @property
    def tokens(self) -> int:
        return self.num_decoding + self.num_chunk_tokens


def plan(
    prompts: Iterable[SimulatedPrompt], description: InstanceDescription, behaviour: Behaviour, costs: StepCosts
) -> PlannedStep:
    """Choose what the next step computes, as the engine does."""
    prompts = tuple(prompts)
    decoding = [prompt for prompt in prompts if prompt.stage == "decoding"][: behaviour.max_running]
    waiting = [prompt for prompt in prompts if prompt.stage == "waiting"]
    num_decoding = sum(len(prompt.outputs) - len(prompt.ended) for prompt in decoding)
    chunk = description.prefill_chunk_size
    limits = BatchLimits(description.max_num_seqs, description.max_num_seqs + chunk, chunk)
    if behaviour.cost is not None:
        streams = Streams(num_decoding, *gap_limit(prompts, behaviour.gap_limit_s))
        limits = paced(limits, costs.now, streams, costs.longest_chunk)
    counts = plan_step([1] * num_decoding + [prompt.num_tokens - prompt.computed for prompt in waiting], limits)
    chunks = [(prompt, count) for prompt, count in zip(waiting, counts[num_decoding:], strict=True) if count]
    return PlannedStep(decoding, num_decoding, chunks)


def gap_limit(prompts: Iterable[SimulatedPrompt], own_s: float) -> tuple[float, bool]:
    """Return the shortest limit of gaps among the streams, those on their way included, and whether any are.

    `own_s` is the instance's limit, for streams without one.
    """
    streams = [prompt for prompt in prompts if prompt.stage in ("decoding", "reserved")]
    limits = [(prompt.state.gap_limit_s if prompt.state else 0.0) or own_s for prompt in streams]
    return min(limits, default=own_s), any(prompt.stage == "reserved" for prompt in streams)


def seconds(step: PlannedStep, behaviour: Behaviour) -> float:
    """Return how long the step takes."""
    cost = behaviour.cost
    if cost is None:
        return behaviour.step_s
    return cost.decode_s(step.num_decoding) + cost.token_s * step.num_chunk_tokens
