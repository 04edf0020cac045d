"""Prove a pair of workers: it must answer a prompt as its decode worker alone does.

Both answers come from the same process, so they differ only by rounding, unless the KV was read from the wrong place.
"""

import math
import secrets
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scheduler.membership.kv_pairs import GapKind, KvGap
from scheduler.request import GenerationRequest
from wire.types import SamplingParams, TokenLogprobs, TokenOutput

MAX_GAP = 0.25
"""Largest difference between two log probabilities that rounding can cause, in nats."""
_PARAMS = SamplingParams(max_tokens=4, min_tokens=4, temperature=0.0, logprobs=5)
_SMALL_VOCABULARY = 250
_MOST_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Position:
    """One output position: the token, its log probability, and those of the likeliest tokens.

    A token is its id, as servers write the text of a partial character differently; its text if a server sends no id.
    """

    token: int | str | None
    logprob: float
    top: Mapping[Any, float]


def next_proofs(unproven: Sequence[KvGap], running: Collection[KvGap]) -> list[KvGap]:
    """Return the pairs to prove now, in addition to the `running` ones: at most 8 in all, and one for each worker.

    Pairs that have failed their proof come last; those of the workers with the most unproven pairs come first, as a
    worker can serve after its first proof.
    """
    lacking = Counter(end for gap in unproven for end in (gap.sender, gap.receiver))
    busy = {end for gap in running for end in (gap.sender, gap.receiver)}
    found: list[KvGap] = []
    for gap in sorted(
        unproven, key=lambda gap: (gap.kind is GapKind.DISPROVEN, -lacking[gap.sender] - lacking[gap.receiver])
    ):
        if len(running) + len(found) == _MOST_AT_ONCE:
            break
        if busy.isdisjoint((gap.sender, gap.receiver)):
            found.append(gap)
            busy |= {gap.sender, gap.receiver}
    return found


def proof_prompt(block_size: int, max_model_len: int) -> tuple[int, ...]:
    """Return a random prompt, two blocks and part of a third, so that no worker can have its KV cached."""
    count = min(2 * block_size + 5, max_model_len - _PARAMS.max_tokens)
    return tuple(1 + byte % _SMALL_VOCABULARY for byte in secrets.token_bytes(count))


def proof_request(prompt: tuple[int, ...], timeout_s: float) -> GenerationRequest:
    """Return a request with this prompt and a cache salt of its own."""
    salt = secrets.token_hex(8)
    return GenerationRequest("proof", (prompt,), _PARAMS, timeout_s, timeout_s, probe=True, cache_salt=salt)


def difference(alone: Sequence[TokenOutput], through: Sequence[TokenOutput], by: str = "alone") -> str | None:
    """Return how two answers differ by more than rounding; None if they do not. `by` describes the first one."""
    if len(alone) != len(through):
        return f"the number of tokens is {len(through)}, but {len(alone)} {by}"
    for one, other in zip(alone, through, strict=True):
        if one.logprobs is None or other.logprobs is None:
            return f"token {one.index} has no log probabilities"
        gap = largest_gap(_position(one, one.logprobs), _position(other, other.logprobs))
        if gap > MAX_GAP:
            shown = f"log probabilities {gap:.3g} apart (limit {MAX_GAP:g})" if gap < math.inf else "no common token"
            return f"token {one.index} is {other.token_id}, but {one.token_id} {by}: {shown}"
        if one.token_id != other.token_id:  # both are about equally likely: what follows cannot be compared
            return None
    return None


def largest_gap(one: Position, other: Position) -> float:
    """Return the smallest possible gap between two positions' log probabilities, in nats; infinity: no common token.

    A token with an id that only one position lists is, at the other, no likelier than the last token listed there.
    """
    ours, theirs = ({**position.top, position.token: position.logprob} for position in (one, other))
    if ours.keys().isdisjoint(theirs):
        return math.inf
    gaps = [abs(ours[token] - theirs[token]) for token in ours.keys() & theirs.keys()]
    for mine, listed in ((ours, other), (theirs, one)):
        last = min(listed.top.values(), default=math.inf)
        gaps += [mine[token] - last for token in mine if isinstance(token, int) and token not in listed.top]
    return max(gaps)


def _position(output: TokenOutput, logprobs: TokenLogprobs) -> Position:
    return Position(output.token_id, logprobs.logprob, dict(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)))
