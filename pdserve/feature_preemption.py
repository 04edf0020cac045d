"""The ways of `pdserve verify --features` in which every prompt is put aside between two of its tokens.

Each is a combined instance with a pool of a tenth of the need. That stops few prompts, and which ones is chance: so the
failpoint engine.preempt has the engine stop each that was not stopped yet, by the code that makes room in a full pool.
"""

from collections.abc import Mapping, Sequence

from pdserve.feature_judges import CaseOutput, CasePrompt
from wire.failpoints import AFTER, PREEMPT, VARIABLE

SWAP, REBUILD = "after preemption (swap)", "after preemption (rebuild)"
FLAGS: Mapping[str, tuple[str, ...]] = {SWAP: (), REBUILD: ("--swap-bytes", "0")}
"""What the instance of each way is started with: room for copies of all that is put aside, or for none."""

VECTOR = "a vector is whole at once: there are no two tokens to be stopped between"
SHORT = "one token is asked for: there are no two to be stopped between"
_STOPPED_AFTER = 2  # so that KV of an output token is there


def environment_of(max_tokens: int) -> dict[str, str]:
    """Return what has an instance stop each prompt in time for answers of `max_tokens`."""
    return {VARIABLE: f"{PREEMPT}={AFTER}:{max(1, min(_STOPPED_AFTER, max_tokens - 1))}"}


def why_meaningless(asks: Sequence[CasePrompt]) -> str | None:
    """Return why there is no middle to stop these in, None where there is one."""
    if any(ask.pooling is not None for ask in asks):
        return VECTOR
    return SHORT if any(ask.params.max_tokens < 2 for ask in asks) else None


def why_unproven(way: str, answers: Sequence[CaseOutput]) -> str | None:
    """Return which prompt was never stopped in this way, None where each was."""
    for number, answer in enumerate(answers):
        if not (answer.num_swaps if way == SWAP else answer.num_rebuilds):
            tokens = max(map(len, answer.sequences), default=0)
            return f"prompt {number} was never preempted between two of its {tokens} tokens"
    return None
