"""The load that a simulated instance reports: a pure function of its prompts."""

from collections.abc import Collection

from engine.step_costs import StepCosts
from simulation.prompt import Behaviour, SimulatedPrompt
from simulation.step import gap_limit
from wire.description import InstanceDescription
from wire.load import LoadSnapshot


def load_of(
    prompts: Collection[SimulatedPrompt], description: InstanceDescription, behaviour: Behaviour, costs: StepCosts,
    now: float,
) -> LoadSnapshot:  # fmt: skip
    """Return the load at a time; counters of what was done so far are the caller's."""
    decoding = sum(len(p.outputs) - len(p.ended) for p in prompts if p.stage == "decoding")
    waiting = sum(prompt.stage == "waiting" for prompt in prompts)
    admits = behaviour.cost is not None  # as in the engine, prompts in prefill count as running
    return LoadSnapshot(
        blocks_total=description.num_blocks,
        blocks_used=sum(prompt.blocks for prompt in prompts),
        blocks_probe=sum(prompt.blocks for prompt in prompts if prompt.probe),
        blocks_cached=0,
        running=decoding + waiting * admits,
        waiting=waiting * (not admits),
        uncomputed_tokens=sum(p.num_tokens - p.computed for p in prompts if p.stage == "waiting"),
        held_prompts=sum(prompt.stage == "sending" for prompt in prompts),
        slowest_turn_s=behaviour.slowest_turn_s,
        starved_s=behaviour.starved_before_s + behaviour.starved_share * now,
        decoding=decoding,
        step_base_s=costs.now.base_s,
        step_sequence_s=costs.now.sequence_s,
        step_token_s=costs.now.token_s,
        gap_limit_s=gap_limit(prompts, behaviour.gap_limit_s)[0],
    )
