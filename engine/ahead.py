"""Decide what may be launched while a step is not collected yet. Pure.

step k    launch ------------- collect, advance
step k+1          launch ------------------------ collect     its decoding rows begin with tokens that step k samples

A sequence whose token is pending is assumed not to stop; if that token is a stop id, the row of step k+1 is discarded.
A prompt whose prefill ends with step k is not in step k+1: it forks when step k is collected.
"""

from collections.abc import Sequence

from engine.finish import is_full
from engine.prompt import ScheduledTokens
from engine.token_counts import has_penalty


def lets_follow(schedule: Sequence[ScheduledTokens]) -> bool:
    """Return whether another step may be launched before the step with this schedule is collected.

    False if the host needs a sampled token to decide what may follow it: one such sequence would either delay the
    others by the host's work between two steps, or take two steps per token.
    """
    return not any(scheduled.reaches_end and needs_history(scheduled) for scheduled in schedule)


def needs_history(scheduled: ScheduledTokens) -> bool:
    """Return whether the host needs the token sampled now to decide what this sequence may choose next."""
    prompt = scheduled.prompt
    if scheduled.sequence is prompt.stem:
        return False
    params, matcher = prompt.state.params, scheduled.sequence.matcher
    is_bound = prompt.is_bound and (matcher is None or not matcher.is_free_for_two)
    return is_bound or prompt.beams is not None or bool(params.bad_words) or has_penalty(params)


def may_continue(scheduled: ScheduledTokens, max_model_len: int) -> bool:
    """Return whether the length limits let the sequence continue after its pending token, if it has one."""
    sequence = scheduled.sequence
    if not sequence.num_awaited:
        return True
    num_outputs = sequence.num_outputs + sequence.num_awaited
    params = scheduled.prompt.state.params
    return not is_full(num_outputs, params, prompt_length=sequence.prompt_length, max_model_len=max_model_len)
