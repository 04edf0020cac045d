"""Decide from its tokens whether a sequence has finished. Pure; used by prefill, decode and resume."""

from collections.abc import Sequence

from wire.types import FinishReason, RepetitionDetection, SamplingParams

Finish = tuple[FinishReason, int | None]
"""The finish reason, and the stop token id if one was the reason."""


def finish_of(
    outputs: Sequence[int], params: SamplingParams, *, prompt_length: int, max_model_len: int
) -> Finish | None:
    """Return why a sequence with these output token ids has finished, or None if it continues."""
    if not outputs:
        return None
    return finish_at(outputs, len(outputs), params, prompt_length=prompt_length, max_model_len=max_model_len)


def finish_at(
    tokens: Sequence[int], num_outputs: int, params: SamplingParams, *, prompt_length: int, max_model_len: int
) -> Finish | None:
    """Return why a sequence has finished, or None. Its last `num_outputs` `tokens`, one or more, are its outputs.

    From `min_tokens` outputs on, a stop token or a repetition finishes it. A stop token takes precedence over a length
    limit reached by the same token, and the length limit over a repetition.
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
    """Return whether the last `num_outputs` of `tokens` end with a pattern repeated as often as `rule` requires.

    Going back from the end, a pattern of `size` tokens continues while each token equals the one `size` before it. The
    Z algorithm computes that length for all sizes in time linear in `num_outputs`.
    """
    largest = min(rule.max_pattern_size, num_outputs // rule.min_count)
    runs = [0] * (largest + 1)  # how many tokens equal those `size` before them
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
    """Return whether a sequence has as many outputs as the limits allow."""
    return num_outputs >= params.max_tokens or prompt_length + num_outputs >= max_model_len


def banned_tokens(params: SamplingParams, position: int, history: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the token ids that output `position` must not be; `history` is the prompt and the outputs before it.

    These are all stop ids until `min_tokens` is reached, and each token that would complete a bad word.
    """
    stops = params.stop_token_ids if position < params.min_tokens else ()
    if not params.bad_words:
        return stops
    longest = max(map(len, params.bad_words)) - 1
    end = tuple(history[-longest:]) if longest else ()
    completing = (word[-1] for word in params.bad_words if end[len(end) - len(word) + 1 :] == word[:-1])
    return (*stops, *completing)
