"""Decide whether a sequence has ended by its tokens. Pure; P, D and resume all ask here."""

from collections.abc import Sequence

from wire.types import FinishReason, RepetitionDetection, SamplingParams

Ending = tuple[FinishReason, int | None]
"""The reason, and the stop token id if one was the reason."""


def finish_of(
    outputs: Sequence[int], params: SamplingParams, *, prompt_length: int, max_model_len: int
) -> Ending | None:
    """Return how a sequence with these output token ids has ended, or None while it goes on."""
    if not outputs:
        return None
    return ending_at(outputs, len(outputs), params, prompt_length=prompt_length, max_model_len=max_model_len)


def ending_at(
    tokens: Sequence[int], num_outputs: int, params: SamplingParams, *, prompt_length: int, max_model_len: int
) -> Ending | None:
    """Return how a sequence has ended whose last `num_outputs` tokens, one or more, are its outputs.

    A stop token counts once `min_tokens` outputs are there, and wins over a length that is reached with it; a
    repetition, which counts from then on too, comes last.
    """
    last = tokens[-1]
    if last in params.stop_token_ids and num_outputs >= params.min_tokens:
        return FinishReason.STOP, last
    if is_full(num_outputs, params, prompt_length=prompt_length, max_model_len=max_model_len):
        return FinishReason.LENGTH, None
    if params.repetition_detection is not None and num_outputs >= params.min_tokens:
        return (FinishReason.REPETITION, None) if repeats(tokens, num_outputs, params.repetition_detection) else None
    return None


def repeats(tokens: Sequence[int], num_outputs: int, rule: RepetitionDetection) -> bool:
    """Whether the last `num_outputs` of `tokens` end with a pattern as often as `rule` counts.

    From the end, a pattern of `size` tokens goes on as long as they equal those `size` further on. The Z algorithm
    computes that length for all sizes in a time that is linear in `num_outputs`.
    """
    largest = min(rule.max_pattern_size, num_outputs // rule.min_count)
    runs = [0] * (largest + 1)  # how many tokens equal those `size` further on
    left = right = 0  # from the end, tokens [left, right) equal [0, right - left)
    for size in range(1, largest + 1):
        run = min(runs[size - left], right - size) if size < right else 0
        while size + run < num_outputs and tokens[-1 - run] == tokens[-1 - size - run]:
            run += 1
        if size + run > right:
            left, right = size, size + run
        if size >= rule.min_pattern_size and run >= size * (rule.min_count - 1):
            return True
        runs[size] = run
    return False


def is_full(num_outputs: int, params: SamplingParams, *, prompt_length: int, max_model_len: int) -> bool:
    """Whether a sequence has as many outputs as it may, whatever they are."""
    return num_outputs >= params.max_tokens or prompt_length + num_outputs >= max_model_len


def banned_tokens(params: SamplingParams, position: int, history: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the token ids that may not be output `position`, which follows `history` (prompt and outputs).

    They are every stop id before `min_tokens` are reached, and each token that would complete a bad word.
    """
    stops = params.stop_token_ids if position < params.min_tokens else ()
    if not params.bad_words:
        return stops
    longest = max(map(len, params.bad_words)) - 1
    end = tuple(history[-longest:]) if longest else ()
    completing = (word[-1] for word in params.bad_words if end[len(end) - len(word) + 1 :] == word[:-1])
    return (*stops, *completing)
