"""A step that is launched and not collected yet."""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.assembly import LayerAnnouncer
from engine.prompt import ScheduledTokens
from engine.sequence import Sequence
from engine.step import PendingStep, StepBatch


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """Owned by the core. Before it is collected, its prompts may end and others may start.

    `samples`: the index of each sequence's sample. `block_ids`: the blocks it writes, each once. `since`: when it was
    started, or when the previous step ended; its duration is measured from there. `num_chunk_tokens`: tokens of prompts
    that it computes. `num_served`: these and the tokens that it samples, without those of probes.
    """

    schedule: list[ScheduledTokens]
    batch: StepBatch
    pending: PendingStep
    announcer: LayerAnnouncer
    since: float
    samples: Mapping[Sequence, int]
    block_ids: tuple[int, ...] = ()
    num_chunk_tokens: int = 0
    num_served: int = 0

    @property
    def composition(self) -> tuple[int, int]:
        """The number of sequences that it decodes, and the number of prompt tokens that it computes."""
        return len(self.batch.token_ids) - self.num_chunk_tokens, self.num_chunk_tokens


def written_blocks(schedule: list[ScheduledTokens], block_size: int) -> tuple[int, ...]:
    """Return the blocks that a step with this schedule writes, each once: no two sequences write the same block."""
    blocks: list[int] = []
    for scheduled in schedule:
        first, end = scheduled.start // block_size, -(-(scheduled.start + scheduled.count) // block_size)
        blocks += scheduled.sequence.block_ids[first:end]
    return tuple(blocks)
