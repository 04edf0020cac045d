"""The sampler's bit masks: the tokens that each sequence's grammar allows next."""

from engine.prompt import ScheduledTokens

_WORD_BITS = 32


def fill_masks(scheduled: ScheduledTokens, vocab_size: int) -> None:
    """Set the mask of each sequence that gets a token from this step. Raises InvalidGrammar if no token is allowed.

    A held prompt's cancelled sequence gets a mask too: the decode instance replays its token through the grammar.
    """
    if not scheduled.reaches_end:
        return
    for index in scheduled.sampled:
        sequence = scheduled.prompt.sampled(index)
        if sequence.matcher is not None and (sequence.finish is None or scheduled.prompt.hold):
            if sequence.matcher.is_free:
                sequence.mask = None
                continue
            import numpy as np  # only with a grammar: the fake engine needs no numpy

            row = np.zeros(-(-vocab_size // _WORD_BITS), dtype=np.int32)
            sequence.matcher.fill(row)
            sequence.mask = row.data
