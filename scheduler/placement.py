"""Choose instances for one prompt. Pure: no I/O, no clock, no torch."""

import dataclasses
from collections.abc import Iterator, Sequence
from operator import attrgetter

from scheduler.load.loads import InstanceLoad, PromptFacts, link_share
from scheduler.load.obstacles import between_ends, first_reasons, obstacles, of_end, of_start
from wire.cheap_dataclass import cheap_dataclass
from wire.errors import NeverFits, Unavailable
from wire.types import Role

Pair = tuple[InstanceLoad, InstanceLoad]
"""The instances that prefill and decode a prompt; the same one twice if it stays there."""

_GOES_ON = 2
"""The smallest output, in tokens, that needs decoding: the first token comes with the prompt."""
_WORTH_SEQUENCES = 4
"""For decode, having the whole prompt cached outweighs this many sequences."""


@cheap_dataclass(frozen=True, slots=True)
class Plan:
    """How to serve one prompt; instances by table index. `prefill` is None on the local path."""

    path: str
    prefill: int | None
    decode: int
    reason: str

    @property
    def pair(self) -> tuple[int | None, int]:
        """The instances in the form of `PromptFacts.avoid`."""
        return (self.prefill, self.decode)


def max_output(loads: Sequence[InstanceLoad], num_tokens: int, num_sequences: int) -> int | None:
    """Return the longest output per sequence after such a prompt, for the largest decode pool of any pair.

    None without a pair. At least 1, even if the prompt itself does not fit: `place` refuses that with a message.
    """
    prompt = PromptFacts(num_tokens, _GOES_ON, num_sequences)
    pairs = list(_usable_pairs(loads, prompt))
    fitting = [pair for pair in pairs if _has_room(*pair, prompt)]
    return max((_max_output(end, num_tokens, num_sequences) for _, end in fitting or pairs), default=None)


def place(loads: Sequence[InstanceLoad], prompt: PromptFacts) -> Plan | None:
    """Return the current plan, or None if the prompt has to wait for room.

    Prefills on the prefill (or combined) instance with the fewest tokens to compute before the prompt's first token:
    the outstanding ones, minus those of the prompt it has cached. A prompt without a second token finishes there.
    Others decode where the whole sequence fits, fewest sequences first, where a cached prefix outweighs a few more
    sequences; ties go to the lower index. A pair without a common KV transport is never chosen.
    Raises Unavailable without a path and NeverFits.
    """
    free = _first_free(loads, prompt) if not prompt.avoid else _first_untried(loads, prompt)
    if free is not None:
        return _plan(*free, prompt)
    if not any(_has_room(*pair, prompt) for pair in _usable_pairs(loads, prompt)):
        pairs = list(_usable_pairs(loads, prompt))
        raise _never_fits(pairs, prompt) if pairs else Unavailable("no path")
    return None


def has_room(loads: Sequence[InstanceLoad], *, prefill_only: bool) -> bool:
    """Whether some prompt might start now; False if even the smallest would have to wait. True without a pair.

    `prefill_only`: also one that finishes on the instance that computes it.
    """
    smallest = PromptFacts(0, _GOES_ON)
    can_start = any(_first_free(loads, dataclasses.replace(smallest, pooled=kind)) for kind in {False, prefill_only})
    return can_start or next(_usable_pairs(loads, smallest), None) is None


def why_waiting(loads: Sequence[InstanceLoad], prompt: PromptFacts) -> str:
    """Return why no pair can take the prompt now; empty if one can, or if none ever can."""
    pairs = [pair for pair in _usable_pairs(loads, prompt) if _has_room(*pair, prompt)]
    peers = _count_peers(loads)
    found = [next(obstacles(start, end, prompt, link_share(start, end, *peers)), "") for start, end in pairs]
    return "" if "" in found else first_reasons(list(dict.fromkeys(found)))


def _count_peers(loads: Sequence[InstanceLoad]) -> tuple[int, int]:
    """Return how many prefill and decode instances share the links."""
    roles = [load.role for load in loads]
    return max(1, roles.count(Role.PREFILL)), max(1, roles.count(Role.DECODE))


def _max_output(load: InstanceLoad, num_tokens: int, num_sequences: int) -> int:
    shared = num_tokens // load.block_size
    blocks = shared + (load.blocks_total - shared) // num_sequences
    return max(1, blocks * load.block_size - num_tokens + 1)


def _first_free(loads: Sequence[InstanceLoad], prompt: PromptFacts) -> Pair | None:
    """Return the first pair that can take the prompt now. A decode instance that cannot is left out of other pairs."""
    peers = _count_peers(loads)
    starts, ends = _in_order(loads, prompt)
    for start in starts:
        if next(of_start(start, prompt), None) is not None:
            continue
        blocked: set[int] = set()
        for end in [start] if _stays(start, prompt) else ends:
            if end is not start and next(of_end(end, prompt), None) is not None:
                blocked.add(end.index)
            elif _can_send(start, end) and _has_room(start, end, prompt):
                between = between_ends(start, end, prompt, link_share(start, end, *peers))
                if next(between, None) is None:
                    return start, end
        if blocked:
            ends = [end for end in ends if end.index not in blocked]
    return None


def _first_untried(loads: Sequence[InstanceLoad], prompt: PromptFacts) -> Pair | None:
    """Return the first free pair that shares as little as possible with the pairs that failed the prompt."""
    fitting = [pair for pair in _usable_pairs(loads, prompt) if _has_room(*pair, prompt)]
    untried = [pair for pair in fitting if _key(*pair) not in prompt.avoid]
    disjoint = [pair for pair in untried if not _shares_failure(_key(*pair), prompt.avoid)]
    peers = _count_peers(loads)
    pairs = disjoint or untried or fitting
    return next(((start, end) for start, end in pairs if _is_free(start, end, prompt, peers)), None)


def _is_free(start: InstanceLoad, end: InstanceLoad, prompt: PromptFacts, peers: tuple[int, int]) -> bool:
    return next(obstacles(start, end, prompt, link_share(start, end, *peers)), None) is None


def _usable_pairs(loads: Sequence[InstanceLoad], prompt: PromptFacts) -> Iterator[Pair]:
    """Yield the pairs with a common KV transport, best first."""
    starts, ends = _in_order(loads, prompt)
    for start in starts:
        for end in [start] if _stays(start, prompt) else ends:
            if _can_send(start, end):
                yield start, end


def _can_send(start: InstanceLoad, end: InstanceLoad) -> bool:
    return end.index not in start.no_transport_to


def _stays(start: InstanceLoad, prompt: PromptFacts) -> bool:
    """Whether the prompt finishes on the instance that prefills it."""
    return prompt.prefill_only or start.role is Role.COMBINED


def _in_order(loads: Sequence[InstanceLoad], prompt: PromptFacts) -> tuple[list[InstanceLoad], list[InstanceLoad]]:
    """Return the instances that can prefill the prompt and those that can decode it, best first."""
    known, shared, length = prompt.known, prompt.shared, max(1, prompt.num_tokens)
    by_index = sorted(loads, key=attrgetter("index"))  # the last criterion first, as sorting keeps the order of equals
    starts = [load for load in by_index if load.role is not Role.DECODE]
    starts.sort(key=lambda load: load.outstanding_tokens - known.get(load.index, 0))
    ends = [] if prompt.prefill_only else [load for load in by_index if load.role is Role.DECODE]
    by_size = {load.block_size: load for load in ends}
    needed = {size: load.blocks_for_all(prompt) for size, load in by_size.items()}
    ends.sort(key=lambda load: load.sequences - _WORTH_SEQUENCES * known.get(load.index, 0) / length)
    ends.sort(
        key=lambda load: needed[load.block_size] - shared.get(load.index, 0) // load.block_size > load.blocks_free
    )
    return starts, ends


def _has_room(start: InstanceLoad, decode: InstanceLoad, prompt: PromptFacts) -> bool:
    """Return whether empty instances could run the whole prompt; with a hand-off, prefill stores only the prompt."""
    return (
        prompt.num_sequences <= min(start.max_num_seqs, decode.max_num_seqs)
        and start.blocks_for(prompt.num_tokens) <= start.blocks_total
        and decode.blocks_for_all(prompt) <= decode.blocks_total
    )


def _never_fits(pairs: Sequence[tuple[InstanceLoad, InstanceLoad]], prompt: PromptFacts) -> NeverFits:
    length, n = prompt.num_tokens, prompt.num_sequences
    max_sequences = max(min(start.max_num_seqs, decode.max_num_seqs) for start, decode in pairs)
    if n > max_sequences:
        return NeverFits(f"n is {n}; the instances run {max_sequences} sequences at most", "n")
    most_tokens = max(min(s.blocks_total * s.block_size, d.blocks_total * d.block_size) for s, d in pairs)
    if length > most_tokens:
        message = f"the prompt has {length} tokens; the instances' KV pools have room for {most_tokens} at most"
        return NeverFits(message, "prompt")
    _, largest = max(pairs, key=lambda pair: pair[1].blocks_total * pair[1].block_size)
    return NeverFits(
        f"{length} prompt tokens and {n} x {prompt.max_tokens} output tokens need {largest.blocks_for_all(prompt)} KV "
        f"blocks of {largest.block_size} tokens; the whole pool has {largest.blocks_total}",
        "max_tokens",
    )


def _has_whole_room(load: InstanceLoad, prompt: PromptFacts) -> bool:
    return load.blocks_for_all(prompt) - load.blocks_shared(prompt) <= load.blocks_free


def _plan(start: InstanceLoad, decode: InstanceLoad, prompt: PromptFacts) -> Plan:
    room = "room for the whole sequence" if _has_whole_room(decode, prompt) else "room for the prompt"
    if prompt.pooled:
        return Plan("pooling", None, start.index, f"{start.name}: {room}")
    if start is decode:
        why = "no token after the first, " if start.role is Role.PREFILL else ""
        return Plan("local", None, decode.index, f"{decode.name}: {why}{room}")
    reason = (
        f"{start.name}: {start.outstanding_tokens} tokens outstanding{_cached_note(start, prompt)}; "
        f"{decode.name}: {decode.sequences} sequences, {room}{_cached_note(decode, prompt)}"
    )
    return Plan(start.path, start.index, decode.index, reason)


def _cached_note(load: InstanceLoad, prompt: PromptFacts) -> str:
    known = prompt.known.get(load.index, 0)
    return f", {known} of {prompt.num_tokens} prompt tokens cached" if known else ""


def _shares_failure(pair: tuple[int | None, int], failed: frozenset[tuple[int | None, int]]) -> bool:
    """Whether an instance of `pair` is in a failed pair: which of the two was at fault is unknown."""
    return not {index for index in pair if index is not None}.isdisjoint(index for other in failed for index in other)


def _key(start: InstanceLoad, decode: InstanceLoad) -> tuple[int | None, int]:
    return (None if start is decode else start.index, decode.index)
