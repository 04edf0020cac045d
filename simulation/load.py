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
    decoding = waiting = sending = uncomputed_tokens = blocks = blocks_probe = 0
    for prompt in prompts:  # once for all of them: this runs at each step
        blocks += prompt.blocks
        blocks_probe += prompt.blocks * prompt.probe
        match prompt.stage:
            case "decoding":
                decoding += len(prompt.outputs) - len(prompt.ended)
            case "waiting":
                waiting += 1
                uncomputed_tokens += prompt.num_tokens - prompt.computed
            case "sending":
                sending += 1
    admits = behaviour.cost is not None  # as in the engine, prompts in prefill count as running
    return LoadSnapshot(
        blocks_total=description.num_blocks,
        blocks_used=blocks,
        blocks_probe=blocks_probe,
        blocks_cached=0,
        running=decoding + waiting * admits,
        waiting=waiting * (not admits),
        uncomputed_tokens=uncomputed_tokens,
        held_prompts=sending,
        slowest_turn_s=behaviour.slowest_turn_s,
        starved_s=behaviour.starved_before_s + behaviour.starved_share * now,
        decoding=decoding,
        step_base_s=costs.now.base_s,
        step_sequence_s=costs.now.sequence_s,
        step_token_s=costs.now.token_s,
        gap_limit_s=gap_limit(prompts, behaviour.gap_limit_s)[0],
    )
