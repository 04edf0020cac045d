"""Two texts as one prompt, as cross-encoders read them: each in its place of the tokenizer's own template."""

from tokenizers import Tokenizer


def encode_pair(tokenizer: Tokenizer, first: str, second: str, longest: int | None) -> tuple[tuple[int, ...], int]:
    """Return the ids of both texts and where the second one's begin; None of its tokens: behind all ids.

    Above `longest` ids the longer text loses tokens from its end until all fit, as transformers' longest_first does.
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
    """Return how many tokens of texts of `first` and `second` are kept in `room`; the longer one loses first."""
    excess = max(0, first + second - room)
    gap = min(excess, abs(first - second))
    if first > second:
        first -= gap
    else:
        second -= gap
    excess -= gap
    return max(0, first - excess // 2), max(0, second - (excess + 1) // 2)
