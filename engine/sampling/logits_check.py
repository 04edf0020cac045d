"""Check that the token ids in sampling parameters are tokens of the model. Pure."""

from collections.abc import Iterable

from wire.errors import InvalidRequest
from wire.types import SamplingParams


def check_token_params(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidRequest for a token id outside the vocabulary, or a list of ids longer than the vocabulary.

    Stop ids must not be negative but may exceed the vocabulary, as in some tokenizers: they are never chosen.
    """
    _check_length("logit_bias", len(params.logit_bias), vocab_size)
    _check_length("allowed_token_ids", len(params.allowed_token_ids), vocab_size)
    _check("logit_bias", (token for token, _ in params.logit_bias), vocab_size)
    _check("allowed_token_ids", params.allowed_token_ids, vocab_size)
    _check("logprob_token_ids", params.logprob_token_ids, vocab_size)
    _check("prompt_logprob_token_ids", (one for ids in params.prompt_logprob_token_ids for one in ids), vocab_size)
    _check("bad_words", (token for word in params.bad_words for token in word), vocab_size)
    if (thinking := params.thinking) is not None:
        _check("thinking", (thinking.start_token_id, thinking.end_token_id), vocab_size)
    lowest = min(params.stop_token_ids, default=0)
    if lowest < 0:
        raise InvalidRequest(f"stop_token_ids has token id {lowest}, but ids must be 0 or more", "stop_token_ids")


def _check_length(param: str, length: int, vocab_size: int) -> None:
    if length > vocab_size:
        raise InvalidRequest(f"{param} has {length} entries, but the vocabulary has {vocab_size} tokens", param)


def _check(param: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{param} has token id {token_id}, which is outside the vocabulary [0, {vocab_size})", param
            )
