"""The heads and the range of an inner size that one rank of an instance has. Pure."""

from dataclasses import dataclass

from wire.errors import ConfigError
from wire.kv_layout import Heads, Rank, head_range, ranks_holding

_MAX_UNIT, _FINE = 6, 8
"""Inner sizes are divided into pieces of 64 or a smaller power of two: evenly, or else at least 8 pieces per rank."""


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The heads of one rank, numbered over the whole model."""

    query: Heads
    kv: Heads


def share_heads(query_heads: int, kv_heads: int, rank: Rank) -> HeadShare:
    """Return a rank's heads. Raises ConfigError, with the numbers, if it would have none."""
    if query_heads % kv_heads:
        raise ConfigError(f"{query_heads} query heads do not divide into {kv_heads} KV heads: no ranks can share them")
    held, group = head_range(kv_heads, rank), query_heads // kv_heads
    if rank.of <= kv_heads:
        return HeadShare(Heads(held.start * group, held.end * group), held)
    sharers = ranks_holding(held.start, kv_heads, rank.of)
    if len(sharers) > group:
        raise ConfigError(
            f"{query_heads} query heads in {kv_heads} KV groups of {group} are too few for {rank.of} ranks: "
            f"{len(sharers)} ranks would share one group; use --tensor-parallel-size {query_heads} or less"
        )
    part = head_range(group, Rank(rank.number - sharers.start, len(sharers)))
    first = held.start * group
    return HeadShare(Heads(first + part.start, first + part.end), held)


def share_inner(name: str, size: int, rank: Rank) -> tuple[int, int]:
    """Return a rank's range of an inner size. Raises ConfigError if there are more ranks than pieces."""
    if size < rank.of:
        raise ConfigError(f"{name}: an inner size of {size} cannot be split over {rank.of} ranks")
    units = [1 << power for power in range(_MAX_UNIT, -1, -1) if size % (1 << power) == 0]
    even = [unit for unit in units if size // unit % rank.of == 0]
    unit = next(iter(even or [unit for unit in units if size // unit >= _FINE * rank.of]), 1)
    part = head_range(size // unit, rank)
    return part.start * unit, part.end * unit
