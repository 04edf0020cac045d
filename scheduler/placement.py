"""Choose instances for one prompt. Pure: no I/O, no clock, no torch."""

import dataclasses
import random
from collections.abc import Iterable, Iterator, Sequence

from scheduler.load.instance_order import InstanceOrder
from scheduler.load.loads import InstanceLoad, PromptFacts, link_share
from scheduler.load.obstacles import between_ends, first_reasons, obstacles, of_end, of_start
from scheduler.load.path_costs import PathCost, cost_of_path
from wire.cheap_dataclass import cheap_dataclass
from wire.errors import NeverFits, Unavailable
from wire.types import Role

Pair = tuple[InstanceLoad, InstanceLoad]
"""The instances that prefill and decode a prompt; one instance twice if it stays there."""

_GOES_ON = 2
"""The smallest output, in tokens, that needs decoding: the first token comes with the prompt."""
HANDOFF = "handoff"
"""The path of our own instances; workers of other engines have paths of their own."""
_NEAR = 1.02
"""A local path that costs at most this many times as much as the cheapest path counts as equally good."""


@cheap_dataclass(frozen=True, slots=True)
class Plan:
    """How to serve one prompt; instances by table index. `prefill` is None on the local path.

    `expected_s` is how long it will take from now on, 0 where paths were not compared.
    """

    path: str
    prefill: int | None
    decode: int
    reason: str
    expected_s: float = 0.0

    @property
    def pair(self) -> tuple[int | None, int]:
        """The instances in the form of `PromptFacts.avoid`."""
        return (self.prefill, self.decode)


def max_output(loads: Sequence[InstanceLoad], num_tokens: int, num_sequences: int) -> int | None:
    """Return the longest output per sequence after a prompt of this size, for the largest decode pool of any pair.

    None without a pair. At least 1, even if the prompt itself does not fit: `place` refuses that with a message.
    """
    prompt = PromptFacts(num_tokens, _GOES_ON, num_sequences)
    pairs = list(_usable_pairs(InstanceOrder(loads, prompt), prompt))
    fitting = [pair for pair in pairs if _has_room(*pair, prompt)]
    return max((_max_output(end, num_tokens, num_sequences) for _, end in fitting or pairs), default=None)


def place(
    loads: Sequence[InstanceLoad], prompt: PromptFacts, hand_off_s: float = 0.0, rng: random.Random | None = None
) -> Plan | None:
    """Return the current plan, or None if the prompt has to wait for room.

    Prefills on the prefill (or combined) instance with the fewest outstanding tokens, where a cached token of the
    prompt outweighs two of them; it waits for the next step there rather than move on. A prompt without a second token
    finishes there.
    Others decode where the whole sequence fits, fewest sequences first, but a cached prefix outweighs a few more
    sequences. A pair without a common KV transport is never chosen.
    If `prompt.expected_outputs` is known, the cost of such a hand-off (`hand_off_s` and the time to compute) is
    compared with that of serving the prompt on one prefill or decode instance alone (load/path_costs.py).
    Ties of instances and near ties of paths are broken by `rng`: otherwise schedulers that see the same loads would all
    choose the same instance until it reports the new prompts. Without `rng`, the order of the table decides.
    Raises Unavailable if there is no path, and NeverFits.
    """
    order = InstanceOrder(loads, prompt, rng)
    free = _first_free(order, prompt) if not prompt.avoid else _first_untried(order, prompt)
    if prompt.expected_outputs and not (prompt.avoid or prompt.prefill_only or (free and free[0] is free[1])):
        options = _compare(loads, order, prompt, free, hand_off_s)
        if options:
            best = _cheapest(options, rng)
            if free is None and not best.is_local:
                return None  # the hand-off that waits for the prefill instance's next step
            plan = _plan(best.start, best.end, prompt)
            reason = "; ".join((plan.reason, ", ".join(map(str, options))))
            return Plan(plan.path, plan.prefill, plan.decode, reason, best.cost.first_token_s + best.cost.rest_s)
    if free is not None:
        return _plan(*free, prompt)
    if not any(_has_room(*pair, prompt) for pair in _usable_pairs(order, prompt)):
        pairs = list(_usable_pairs(order, prompt))
        raise _never_fits(pairs, prompt) if pairs else Unavailable("no path")
    return None


@cheap_dataclass(frozen=True, slots=True)
class _Option:
    """A path and what it costs."""

    start: InstanceLoad
    end: InstanceLoad
    cost: PathCost

    @property
    def is_local(self) -> bool:
        return self.start is self.end

    def __str__(self) -> str:
        how = f"{self.start.role} instance alone" if self.is_local else "hand-off"
        return f"{how} {self.cost.total_s:.3f} s"


def _compare(
    loads: Sequence[InstanceLoad], order: InstanceOrder, prompt: PromptFacts, pair: Pair | None, hand_off_s: float
) -> list[_Option]:
    """Return the hand-off and the two local paths with their costs; nothing until a step has been measured.

    `pair` is the hand-off that may start now. Without one, the hand-off that only waits for a prefill instance's next
    step is compared: a prompt that is served sooner by waiting for this step is not placed on another instance.
    """
    pairs = [pair or _next_pair(order, prompt)]
    for instances in (order.starts, () if prompt.has_images else order.ends):
        alone = next((one for one in instances if _may_serve_alone(one, prompt)), None)
        pairs.append(None if alone is None else (alone, alone))
    costs = [(one, cost_of_path(*one, prompt, loads, hand_off_s)) for one in pairs if one is not None]
    return [_Option(*one, cost) for one, cost in costs if cost is not None]


def _cheapest(options: Sequence[_Option], rng: random.Random | None) -> _Option:
    """Return the option that costs least, or any local one that costs nearly as little.

    Never a hand-off that costs more than a local path: it would bring longer gaps between tokens for nothing.
    """
    least = min(options, key=_total)
    if rng is None:
        return least
    most_s = _NEAR * _total(least)
    return rng.choice([one for one in options if one is least or (one.is_local and _total(one) <= most_s)])


def _total(option: _Option) -> float:
    return option.cost.total_s


def _may_serve_alone(load: InstanceLoad, prompt: PromptFacts) -> bool:
    """Whether one of our own prefill or decode instances has room for the whole prompt with its outputs now."""
    return (
        load.path == HANDOFF
        and load.role is not Role.COMBINED
        and load.index not in load.no_transport_to
        and _has_room(load, load, prompt)
        and _has_whole_room(load, prompt)
        and next(of_start(load, prompt), None) is None
        and next(of_end(load, prompt), None) is None
    )


def _next_pair(order: InstanceOrder, prompt: PromptFacts) -> Pair | None:
    """Return the first pair that has to wait for the prefill instance's next step and for nothing else."""
    for start in order.starts:
        if not _stays(start, prompt) and (end := _end_after_step(start, order, prompt)) is not None:
            return start, end
    return None


def _end_after_step(start: InstanceLoad, order: InstanceOrder, prompt: PromptFacts) -> InstanceLoad | None:
    """Return where the prompt could be decoded if it only has to wait for the next step of `start`."""
    if start.can_start or len(list(of_start(start, prompt))) > 1:
        return None
    for end in [start] if _stays(start, prompt) else order.ends:
        between = between_ends(start, end, prompt, link_share(start, end, *order.peers))
        obstacle = (end is not start and next(of_end(end, prompt), None)) or next(between, None)
        if not obstacle and _can_send(start, end) and _has_room(start, end, prompt):
            return end
    return None


def _waits_for(start: InstanceLoad, order: InstanceOrder, prompt: PromptFacts) -> bool:
    """Whether the prompt waits for the next step of `start`, to compute nothing elsewhere that is cached there."""
    return bool(prompt.known.get(start.index)) and _end_after_step(start, order, prompt) is not None


def has_room(loads: Sequence[InstanceLoad], *, prefill_only: bool, alone: bool = False) -> bool:
    """Whether some prompt might start now; False if even the smallest would have to wait. True without a pair.

    `prefill_only`: also a prompt that finishes on the instance that computes it; `alone`: any prompt may do so.
    """
    smallest = PromptFacts(0, _GOES_ON)
    kinds = [dataclasses.replace(smallest, pooled=kind) for kind in {False, prefill_only}]
    can_start = any(_first_free(InstanceOrder(loads, kind), kind) for kind in kinds)
    can_start = can_start or (alone and any(_may_serve_alone(load, smallest) for load in loads))
    return can_start or next(_usable_pairs(InstanceOrder(loads, smallest), smallest), None) is None


def why_waiting(loads: Sequence[InstanceLoad], prompt: PromptFacts) -> str:
    """Return why no pair can take the prompt now; empty if one can, or if none ever can."""
    order = InstanceOrder(loads, prompt)
    pairs = [pair for pair in _usable_pairs(order, prompt) if _has_room(*pair, prompt)]
    shares = [link_share(start, end, *order.peers) for start, end in pairs]
    found = [next(obstacles(*pair, prompt, share), "") for pair, share in zip(pairs, shares, strict=True)]
    if "" in found and _first_free(order, prompt) is None:
        awaited = [start for start in order.starts if _waits_for(start, order, prompt)]
        found = [reason for start in awaited for reason in of_start(start, prompt)]
    return "" if "" in found else first_reasons(list(dict.fromkeys(found)))


def _max_output(load: InstanceLoad, num_tokens: int, num_sequences: int) -> int:
    shared = num_tokens // load.block_size
    blocks = shared + (load.blocks_total - shared) // num_sequences
    return max(1, blocks * load.block_size - num_tokens + 1)


def _first_free(order: InstanceOrder, prompt: PromptFacts) -> Pair | None:
    """Return the first pair that can take the prompt now. A decode instance that cannot is not tried again."""
    ends: Iterable[InstanceLoad] = order.ends
    for start in order.starts:
        if next(of_start(start, prompt), None) is not None:
            if _waits_for(start, order, prompt):
                return None
            continue
        blocked: set[int] = set()
        for end in [start] if _stays(start, prompt) else ends:
            if end is not start and next(of_end(end, prompt), None) is not None:
                blocked.add(end.index)
            elif _can_send(start, end) and _has_room(start, end, prompt):
                between = between_ends(start, end, prompt, link_share(start, end, *order.peers))
                if next(between, None) is None:
                    return start, end
        if blocked:
            ends = [end for end in ends if end.index not in blocked]
    return None


def _first_untried(order: InstanceOrder, prompt: PromptFacts) -> Pair | None:
    """Return the first free pair that shares as little as possible with the pairs that failed the prompt."""
    fitting = [pair for pair in _usable_pairs(order, prompt) if _has_room(*pair, prompt)]
    untried = [pair for pair in fitting if _key(*pair) not in prompt.avoid]
    disjoint = [pair for pair in untried if not _shares_failure(_key(*pair), prompt.avoid)]
    peers = order.peers
    pairs = disjoint or untried or fitting
    return next(((start, end) for start, end in pairs if _is_free(start, end, prompt, peers)), None)


def _is_free(start: InstanceLoad, end: InstanceLoad, prompt: PromptFacts, peers: tuple[int, int]) -> bool:
    return next(obstacles(start, end, prompt, link_share(start, end, *peers)), None) is None


def _usable_pairs(order: InstanceOrder, prompt: PromptFacts) -> Iterator[Pair]:
    """Yield the pairs with a common KV transport, best first."""
    for start in order.starts:
        for end in [start] if _stays(start, prompt) else order.ends:
            if _can_send(start, end):
                yield start, end


def _can_send(start: InstanceLoad, end: InstanceLoad) -> bool:
    return end.index not in start.no_transport_to


def _stays(start: InstanceLoad, prompt: PromptFacts) -> bool:
    """Whether the prompt finishes on the instance that prefills it."""
    return prompt.prefill_only or start.role is Role.COMBINED


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
        message = f"the prompt needs {n} sequences at once (n or best_of), but the instances' limit is {max_sequences}"
        return NeverFits(message, "n")
    most_tokens = max(min(s.blocks_total * s.block_size, d.blocks_total * d.block_size) for s, d in pairs)
    if length > most_tokens:
        message = f"the prompt has {length} tokens, but the instances' KV pools have room for {most_tokens} at most"
        return NeverFits(message, "prompt")
    _, largest = max(pairs, key=lambda pair: pair[1].blocks_total * pair[1].block_size)
    return NeverFits(
        f"{length} prompt tokens and {n} x {prompt.max_tokens} output tokens need {largest.blocks_for_all(prompt)} KV "
        f"blocks of {largest.block_size} tokens, but the whole pool has {largest.blocks_total}",
        "max_tokens",
    )


def _has_whole_room(load: InstanceLoad, prompt: PromptFacts) -> bool:
    return load.blocks_for_all(prompt) - load.blocks_shared(prompt) <= load.blocks_free


def _plan(start: InstanceLoad, decode: InstanceLoad, prompt: PromptFacts) -> Plan:
    room = "room for the whole sequence" if _has_whole_room(decode, prompt) else "room for the prompt"
    if prompt.pooled:
        return Plan("pooling", None, start.index, f"{start.name}: {room}")
    if start is decode:
        why = "no token after the first, " if prompt.prefill_only and start.role is Role.PREFILL else ""
        return Plan("local", None, decode.index, f"{decode.name}: {why}{room}")
    reason = (
        f"{start.name}: outstanding tokens: {start.outstanding_tokens}{_cached_note(start, prompt)}; "
        f"{decode.name}: sequences: {decode.sequences}, {room}{_cached_note(decode, prompt)}"
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
