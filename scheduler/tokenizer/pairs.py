"""Encode two texts as one prompt for cross-encoders, with the tokenizer's own template."""

from tokenizers import Tokenizer


def encode_pair(tokenizer: Tokenizer, first: str, second: str, longest: int | None) -> tuple[tuple[int, ...], int]:
    """Return the ids of both texts and where the second one's begin; if it has no tokens, the number of ids.

    If there are more than `longest` ids, the longer text is truncated first, as in transformers' longest_first.
    """
    encodings = tokenizer.encode_batch([first, second], add_special_tokens=False)
    if longest is not None:
        room = max(0, longest - tokenizer.num_special_tokens_to_add(True))
        lengths = shortened(len(encodings[0]), len(encodings[1]), room)
        for encoding, length in zip(encodings, lengths, strict=True):
            encoding.truncate(length)
    whole = tokenizer.post_process(encodings[0], encodings[1], True)
    ids, texts = tuple(whole.ids), whole.sequence_ids
    return ids, texts.index(1) if 1 in texts else len(ids)


def shortened(first: int, second: int, room: int) -> tuple[int, int]:
    """Return how many of the `first` and `second` tokens of two texts fit into `room`; the longer text is cut first."""
    excess = max(0, first + second - room)
    gap = min(excess, abs(first - second))
    if first > second:
        first -= gap
    else:
        second -= gap
    excess -= gap
    return max(0, first - excess // 2), max(0, second - (excess + 1) // 2)


def first_tokens(tokenizer: Tokenizer, text: str, limit: int) -> str:
    """Return the beginning of `text` that has at most `limit` tokens, not counting special ones."""
    while text:
        offsets = tokenizer.encode(text, add_special_tokens=False).offsets
        if len(offsets) <= limit:
            break
        text = text[: min(offsets[limit - 1][1], offsets[limit][0], len(text) - 1)]
    return text
