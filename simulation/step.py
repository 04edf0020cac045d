"""What a simulated instance's next step computes, and for how long: pure functions of its prompts."""

import dataclasses
from collections.abc import Collection, Iterable, Sequence

from engine.batcher import BatchLimits, Streams, paced, plan_step
from engine.step_costs import StepCosts
from simulation.prompt import Behaviour, SimulatedPrompt
from wire.description import InstanceDescription


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedStep:
    """The prompts that decode in a step, the number of their sequences, and the chunks with their numbers of tokens.

    The step takes `seconds`.
    """

    decoding: Sequence[SimulatedPrompt]
    num_decoding: int
    chunks: Sequence[tuple[SimulatedPrompt, int]]
    num_chunk_tokens: int
    seconds: float

    @property
    def tokens(self) -> int:
        return self.num_decoding + self.num_chunk_tokens


def plan(
    prompts: Collection[SimulatedPrompt], description: InstanceDescription, behaviour: Behaviour, costs: StepCosts
) -> PlannedStep:
    """Choose what the next step computes, as the engine does."""
    decoding = [prompt for prompt in prompts if prompt.stage == "decoding"][: behaviour.max_running]
    waiting = [prompt for prompt in prompts if prompt.stage == "waiting"]
    num_decoding = sum(len(prompt.outputs) - len(prompt.ended) for prompt in decoding)
    cost = behaviour.cost
    if not waiting:
        seconds = behaviour.step_s if cost is None else cost.decode_s(num_decoding)
        return PlannedStep(decoding, num_decoding, (), 0, seconds)
    chunk = description.prefill_chunk_size
    limits = BatchLimits(description.max_num_seqs, description.max_num_seqs + chunk, chunk)
    if cost is not None:
        streams = Streams(num_decoding, *gap_limit(prompts, behaviour.gap_limit_s))
        limits = paced(limits, costs.now, streams, costs.longest_chunk)
    counts = plan_step([1] * num_decoding + [prompt.num_tokens - prompt.computed for prompt in waiting], limits)
    chunks = [(prompt, count) for prompt, count in zip(waiting, counts[num_decoding:], strict=True) if count]
    num_chunk_tokens = sum(count for _, count in chunks)
    seconds = behaviour.step_s if cost is None else cost.decode_s(num_decoding) + cost.token_s * num_chunk_tokens
    return PlannedStep(decoding, num_decoding, chunks, num_chunk_tokens, seconds)


def gap_limit(prompts: Iterable[SimulatedPrompt], own_s: float) -> tuple[float, bool]:
    """Return the shortest gap limit of the streams, including expected ones, and whether any are expected.

    `own_s` is the instance's limit, for streams without one.
    """
    streams = [prompt for prompt in prompts if prompt.stage in ("decoding", "reserved")]
    limits = [(prompt.state.gap_limit_s if prompt.state else 0.0) or own_s for prompt in streams]
    return min(limits, default=own_s), any(prompt.stage == "reserved" for prompt in streams)
