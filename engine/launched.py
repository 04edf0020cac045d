"""A step that is launched and not collected yet, and what has to be known of it until then."""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.assembly import LayerAnnouncer
from engine.prompt import ScheduledTokens
from engine.sequence import Sequence
from engine.step import PendingStep, StepBatch


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """Owned by the core. Its prompts may end, and others begin, before it is collected.

    `samples` are the numbers of its sequences' samples. It writes `block_ids`, each named once. `since`: when it was
    begun, or when the one before it was done; what lies between that and its own end is its time.
    """

    pieces: list[ScheduledTokens]
    batch: StepBatch
    pending: PendingStep
    announcer: LayerAnnouncer
    since: float
    samples: Mapping[Sequence, int]
    block_ids: tuple[int, ...] = ()


def written_blocks(pieces: list[ScheduledTokens], block_size: int) -> tuple[int, ...]:
    """Return the blocks that a step of these pieces writes, each once: no two sequences write the same."""
    blocks: list[int] = []
    for piece in pieces:
        first, end = piece.start // block_size, -(-(piece.start + piece.count) // block_size)
        blocks += piece.sequence.block_ids[first:end]
    return tuple(blocks)
