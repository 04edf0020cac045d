"""The instances that can prefill a prompt and those that can decode it, best first. Pure.

The best one is taken nearly always, so only that is searched for; the others are sorted if it is not taken.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from scheduler.load.loads import InstanceLoad, PromptFacts
from wire.types import Role

_WORTH_SEQUENCES = 4
"""Among decode instances, having the whole prompt cached outweighs this many sequences."""

_WORTH_TOKENS = 2
"""Among prefill instances, a cached token outweighs so many outstanding ones: computed again, it would delay others."""


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

    Starts with the fewest outstanding tokens come first; a cached token of the prompt outweighs some of them. Of the
    ends, those with room for the whole prompt come first, among them those with the fewest sequences; a cached prefix
    outweighs a few sequences. Of several best ones `rng` draws the first; other ties, and all without `rng`, are in the
    order of the table. `peers` are how many prefill and decode instances share the links, 1 at least.
    """

    def __init__(self, loads: Sequence[InstanceLoad], prompt: PromptFacts, rng: random.Random | None = None) -> None:
        by_role: dict[Role, list[InstanceLoad]] = {role: [] for role in Role}
        for load in loads:
            by_role[load.role].append(load)
        prefill, decode, combined = by_role[Role.PREFILL], by_role[Role.DECODE], by_role[Role.COMBINED]
        self.peers = max(1, len(prefill)), max(1, len(decode))
        starts = (
            [load for load in loads if load.role is not Role.DECODE] if prefill and combined else prefill or combined
        )
        self.starts = _starts(starts, prompt, rng)
        self.ends = _ends([] if prompt.prefill_only else decode, prompt, rng)


def _starts(loads: Sequence[InstanceLoad], prompt: PromptFacts, rng: random.Random | None) -> _BestFirst:
    known = prompt.known

    def key(load: InstanceLoad) -> float:
        return load.outstanding_tokens - _WORTH_TOKENS * known.get(load.index, 0)

    keys = [key(load) for load in loads] if known else [load.outstanding_tokens for load in loads]
    return _BestFirst(loads, _first(loads, keys, rng), key)


def _ends(loads: Sequence[InstanceLoad], prompt: PromptFacts, rng: random.Random | None) -> _BestFirst:
    known, shared, length = prompt.known, prompt.shared, max(1, prompt.num_tokens)
    needed: dict[int, int] = {}

    def lacks_room(load: InstanceLoad) -> bool:
        size = load.block_size
        if size not in needed:
            needed[size] = load.blocks_for_all(prompt)
        return needed[size] - shared.get(load.index, 0) // size > load.blocks_free

    def key(load: InstanceLoad) -> tuple[bool, float]:
        return lacks_room(load), load.sequences - _WORTH_SEQUENCES * known.get(load.index, 0) / length

    first = None if known else _first(loads, [load.sequences for load in loads], rng)
    if first is None or lacks_room(first):
        first = _first(loads, [key(load) for load in loads], rng)
    return _BestFirst(loads, first, key)


def _first(loads: Sequence[InstanceLoad], keys: list[Any], rng: random.Random | None) -> InstanceLoad | None:
    """Return a load with the least of the keys: one drawn by `rng`, else the first."""
    if not keys:
        return None
    least = min(keys)
    at = keys.index(least)
    if rng is not None:
        for _ in range(int(rng.random() * keys.count(least))):
            at = keys.index(least, at + 1)
    return loads[at]
