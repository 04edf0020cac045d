"""Which tokens the grammars of a step's sequences allow next, as the sampler takes it: one bit a token."""

from engine.prompt import ScheduledTokens

_WORD_BITS = 32


def fill_masks(piece: ScheduledTokens, vocab_size: int) -> None:
    """Set the mask of each sequence that gets a token from this piece. Raises InvalidGrammar where none may follow.

    A held prompt's cancelled sequence gets one, too: who takes the prompt on reads it by the grammar.
    """
    if not piece.reaches_end:
        return
    for index in piece.sampled:
        sequence = piece.prompt.sampled(index)
        if sequence.matcher is not None and (sequence.finish is None or piece.prompt.hold):
            import numpy as np  # only where a grammar is: the fake engine does without

            row = np.zeros(-(-vocab_size // _WORD_BITS), dtype=np.int32)
            sequence.matcher.fill(row)
            sequence.mask = row.data
