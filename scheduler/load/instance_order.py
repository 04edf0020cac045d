"""The instances that can prefill a prompt and those that can decode it, best first. Pure.

The best one is taken nearly always, so only that is searched for; the others are sorted if it is not taken.
"""

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

from scheduler.load.loads import InstanceLoad, PromptFacts
from wire.types import Role

_WORTH_SEQUENCES = 4
"""Among decode instances, having the whole prompt cached outweighs this many sequences."""
_outstanding = attrgetter("outstanding_tokens")
_sequences = attrgetter("sequences")


class _BestFirst:
    """Instances by a key, those of equal keys in the order given; may be iterated over repeatedly."""

    def __init__(self, loads: Sequence[InstanceLoad], first: InstanceLoad | None, key: Callable[[InstanceLoad], Any]):
        self._loads, self._first, self._key = loads, first, key
        self._rest: list[InstanceLoad] | None = None

    def __iter__(self) -> Iterator[InstanceLoad]:
        first = self._first
        if first is None:
            return
        yield first
        if self._rest is None:
            self._rest = [load for load in sorted(self._loads, key=self._key) if load is not first]
        yield from self._rest


class InstanceOrder:
    """The `starts` that may prefill a prompt, and the `ends` that may decode it, each best first.

    Starts with the fewest tokens to compute before the prompt's first token come first. Of the ends, those with room
    for the whole prompt come first, among them those with the fewest sequences; a cached prefix outweighs a few
    sequences. Ties go to the first one in the table. `peers` are how many prefill and decode instances share the links,
    1 at least.
    """

    def __init__(self, loads: Sequence[InstanceLoad], prompt: PromptFacts) -> None:
        by_role: dict[Role, list[InstanceLoad]] = {role: [] for role in Role}
        for load in loads:
            by_role[load.role].append(load)
        prefill, decode, combined = by_role[Role.PREFILL], by_role[Role.DECODE], by_role[Role.COMBINED]
        self.peers = max(1, len(prefill)), max(1, len(decode))
        starts = (
            [load for load in loads if load.role is not Role.DECODE] if prefill and combined else prefill or combined
        )
        self.starts = _starts(starts, prompt)
        self.ends = _ends([] if prompt.prefill_only else decode, prompt)


def _starts(loads: Sequence[InstanceLoad], prompt: PromptFacts) -> _BestFirst:
    known = prompt.known

    def key(load: InstanceLoad) -> float:
        return load.outstanding_tokens - known.get(load.index, 0)

    return _BestFirst(loads, min(loads, key=key if known else _outstanding, default=None), key)


def _ends(loads: Sequence[InstanceLoad], prompt: PromptFacts) -> _BestFirst:
    known, shared, length = prompt.known, prompt.shared, max(1, prompt.num_tokens)
    needed: dict[int, int] = {}

    def lacks_room(load: InstanceLoad) -> bool:
        size = load.block_size
        if size not in needed:
            needed[size] = load.blocks_for_all(prompt)
        return needed[size] - shared.get(load.index, 0) // size > load.blocks_free

    def key(load: InstanceLoad) -> tuple[bool, float]:
        return lacks_room(load), load.sequences - _WORTH_SEQUENCES * known.get(load.index, 0) / length

    first = None if known else min(loads, key=_sequences, default=None)
    if first is None or lacks_room(first):
        first = min(loads, key=key, default=None)
    return _BestFirst(loads, first, key)
