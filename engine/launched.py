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
    started, or when the previous step ended; its duration is measured from there.
    """

    pieces: list[ScheduledTokens]
    batch: StepBatch
    pending: PendingStep
    announcer: LayerAnnouncer
    since: float
    samples: Mapping[Sequence, int]
    block_ids: tuple[int, ...] = ()


def written_blocks(pieces: list[ScheduledTokens], block_size: int) -> tuple[int, ...]:
    """Return the blocks that a step of these pieces writes, each once: no two sequences write the same block."""
    blocks: list[int] = []
    for piece in pieces:
        first, end = piece.start // block_size, -(-(piece.start + piece.count) // block_size)
        blocks += piece.sequence.block_ids[first:end]
    return tuple(blocks)
