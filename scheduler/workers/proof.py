"""Prove a pair of workers: through it, a prompt must be answered as by its decode worker alone.

Both answers come from the same process, so they differ only by rounding, unless the KV was read from the wrong place.
"""

import secrets
from collections import Counter
from collections.abc import Collection, Sequence

from scheduler.membership.kv_pairs import GapKind, KvGap
from scheduler.request import GenerationRequest
from wire.types import SamplingParams, TokenOutput

MAX_GAP = 0.25
"""Largest difference between two log probabilities that rounding can cause, in nats."""
_PARAMS = SamplingParams(max_tokens=4, min_tokens=4, temperature=0.0, logprobs=5)
_SMALL_VOCABULARY = 250
_MOST_AT_ONCE = 8


def next_proofs(unproven: Sequence[KvGap], running: Collection[KvGap]) -> list[KvGap]:
    """Return the pairs to prove now, in addition to the `running` ones: at most 8 in all, one for each worker.

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
    """Return a random prompt of two blocks and part of a third: no worker holds the KV of an earlier one like it."""
    count = min(2 * block_size + 5, max_model_len - _PARAMS.max_tokens)
    return tuple(1 + byte % _SMALL_VOCABULARY for byte in secrets.token_bytes(count))


def proof_request(prompt: tuple[int, ...], timeout_s: float) -> GenerationRequest:
    """Return a request with this prompt, kept out of others' caches."""
    salt = secrets.token_hex(8)
    return GenerationRequest("proof", (prompt,), _PARAMS, timeout_s, timeout_s, probe=True, cache_salt=salt)


def difference(alone: Sequence[TokenOutput], through: Sequence[TokenOutput], by: str = "alone") -> str | None:
    """Return how two answers differ by more than rounding; None if they do not. `by` describes the first one."""
    if len(alone) != len(through):
        return f"{len(through)} tokens, and {len(alone)} {by}"
    for one, other in zip(alone, through, strict=True):
        gap = _largest_gap(_by_token(one), _by_token(other))
        if gap is None or gap > MAX_GAP:
            shown = "no common token" if gap is None else f"log probabilities {gap:.3g} apart (limit {MAX_GAP:g})"
            return f"token {one.index} is {other.token_id}, and {one.token_id} {by}: {shown}"
        if one.token_id != other.token_id:  # both are about equally likely: what follows cannot be compared
            return None
    return None


def _by_token(output: TokenOutput) -> dict[int, float]:
    logprobs = output.logprobs
    if logprobs is None or output.token_id is None:
        return {}
    return {output.token_id: logprobs.logprob} | dict(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True))


def _largest_gap(one: dict[int, float], other: dict[int, float]) -> float | None:
    return max((abs(one[token] - other[token]) for token in one.keys() & other.keys()), default=None)
