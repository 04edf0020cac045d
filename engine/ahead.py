"""What may be launched behind a step that is not collected yet. Pure.

step k    launch ------------- collect, advance
step k+1          launch ------------------------ collect     its decoding rows begin with tokens that step k samples

A sequence that awaits its token goes on as if that were no stop id; if it is one, the row is dropped when it is there.
A prompt whose own tokens end with step k sits out step k+1: it forks when that is collected.
"""

from collections.abc import Sequence

from engine.finish import is_full
from engine.prompt import ScheduledTokens
from engine.token_counts import has_penalty


def lets_follow(pieces: Sequence[ScheduledTokens]) -> bool:
    """Whether another step may be launched before the one of these pieces is collected.

    Not where the host has to know a token of it to say what may come next: one such sequence would either hold up the
    others by what the host does between two steps, or take two steps for each of its tokens, whatever their number.
    """
    return not any(piece.reaches_end and needs_history(piece) for piece in pieces)


def needs_history(piece: ScheduledTokens) -> bool:
    """Whether what its sequence may choose next depends on the token that is sampled now, by the host's reckoning."""
    prompt = piece.prompt
    if piece.sequence is prompt.stem:
        return False
    params = prompt.state.params
    return prompt.is_bound or prompt.beams is not None or bool(params.bad_words) or has_penalty(params)


def goes_on(piece: ScheduledTokens, max_model_len: int) -> bool:
    """Whether the piece's sequence goes on after the token that it awaits, if it awaits one, by lengths alone."""
    sequence = piece.sequence
    if not sequence.num_awaited:
        return True
    num_outputs = sequence.num_outputs + sequence.num_awaited
    params = piece.prompt.state.params
    return not is_full(num_outputs, params, prompt_length=sequence.prompt_length, max_model_len=max_model_len)
