"""Fields with token rules: biases, allowed tokens and bad words."""

from collections.abc import Mapping, Sequence

from scheduler.api.prompts import check_token_ids
from scheduler.tokens import Tokens
from wire.errors import InvalidRequest
from wire.parameter_rules import MAX_BIAS

_SHOWN = 10


def read_logit_bias(given: Mapping[str, float] | None, tokens: Tokens) -> tuple[tuple[int, float], ...]:
    """Return (token id, bias) pairs, each bias clipped to [-100, 100]. Raises InvalidRequest naming every bad key."""
    if not given:
        return ()
    bad = [key for key in given if not (key.isascii() and key.isdigit())]
    if bad:
        shown = ", ".join(repr(key)[:40] for key in bad[:_SHOWN])
        raise InvalidRequest(f"logit_bias has keys that are not token ids: {shown}", "logit_bias")
    out = [key for key in given if len(key) > _SHOWN or int(key) >= tokens.vocab_size]
    if out:
        raise InvalidRequest(
            f"logit_bias has token ids out of vocabulary: {', '.join(key[:20] for key in out[:_SHOWN])}; ids are "
            f"0..{tokens.vocab_size - 1}",
            "logit_bias",
        )
    return tuple((int(key), max(-MAX_BIAS, min(MAX_BIAS, bias))) for key, bias in given.items())


def read_allowed(given: Sequence[int] | None, tokens: Tokens) -> tuple[int, ...]:
    """Return the ids to choose from, empty for all. Raises InvalidRequest."""
    if given is None:
        return ()
    if not 1 <= len(given) <= tokens.vocab_size:
        raise InvalidRequest(
            f"allowed_token_ids has {len(given)} ids, but must have 1 to {tokens.vocab_size}", "allowed_token_ids"
        )
    allowed = tuple(dict.fromkeys(given))
    check_token_ids(allowed, tokens, "allowed_token_ids")
    return allowed


async def read_bad_words(given: Sequence[str] | None, tokens: Tokens) -> tuple[tuple[int, ...], ...]:
    """Return the ids of each word, both at the start of a text and, where they differ, after a space."""
    words: dict[tuple[int, ...], None] = {}
    for word in given or ():
        for spelled in (word.lstrip(" "), " " + word.lstrip(" ")):
            if spelled.strip():
                words[await tokens.encode(spelled, add_special_tokens=False, param="bad_words")] = None
        if not word.strip():
            raise InvalidRequest("bad_words has a word that is empty or blank", "bad_words")
    return tuple(ids for ids in words if ids)
