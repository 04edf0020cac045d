"""The runs of `pdserve verify --features` that preempt every prompt between two of its tokens.

Each run is a combined instance whose pool has a tenth of the blocks needed. That alone preempts only a
few random prompts, so the failpoint engine.preempt preempts the others, with the code that frees blocks in a full pool.
"""

from collections.abc import Mapping, Sequence

from pdserve.feature_judges import CaseOutput, CasePrompt
from processes.failpoints import AFTER, PREEMPT, VARIABLE

SWAP, REBUILD = "after preemption (swap)", "after preemption (rebuild)"
FLAGS: Mapping[str, tuple[str, ...]] = {SWAP: (), REBUILD: ("--swap-bytes", "0")}
"""Extra flags of each run's instance: room for copies of all preempted KV, or for none."""

VECTOR = "a vector has no tokens between which the prompt could be preempted"
SHORT = "only one token is requested: the prompt cannot be preempted between two"
_STOPPED_AFTER = 2  # so that KV of an output token exists


def environment_of(max_tokens: int) -> dict[str, str]:
    """Return the variables that make an instance preempt each prompt within `max_tokens` tokens."""
    return {VARIABLE: f"{PREEMPT}={AFTER}:{max(1, min(_STOPPED_AFTER, max_tokens - 1))}"}


def why_meaningless(prompts: Sequence[CasePrompt]) -> str | None:
    """Return why these prompts cannot be preempted midway, None if they can."""
    if any(prompt.pooling is not None for prompt in prompts):
        return VECTOR
    return SHORT if any(prompt.params.max_tokens < 2 for prompt in prompts) else None


def why_unproven(way: str, answers: Sequence[CaseOutput]) -> str | None:
    """Return which prompt was never preempted in this run, None if each was."""
    for number, answer in enumerate(answers):
        if not (answer.num_swaps if way == SWAP else answer.num_rebuilds):
            tokens = max(map(len, answer.sequences), default=0)
            return f"prompt {number} was never preempted between two of its {tokens} tokens"
    return None
