"""Log probabilities of given tokens at positions of a prompt: read from a request, and written as a matrix. Pure."""

import base64
import math
from collections.abc import Sequence

from scheduler.api.prompts import check_token_ids
from scheduler.api.vector_bytes import to_bytes
from scheduler.tokens import Tokens
from wire.errors import InvalidRequest
from wire.types import TokenLogprobs

FIELD = "prompt_logprob_token_ids"
_PAD = -1
_MAGIC, _ALIGNMENT = b"\x93NUMPY\x01\x00", 64


def read_lists(
    given: Sequence[Sequence[int]], start: int, num_tokens: int, tokens: Tokens, max_logprobs: int
) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each position from `start` + 1 to the end of a prompt with `num_tokens` tokens.

    `max_logprobs` is how many a position may have; -1 means any number. Raises InvalidRequest.
    """
    num_rows = max(0, num_tokens - 1 - start)
    if len(given) != num_rows:
        raise InvalidRequest(
            f"{FIELD} has {len(given)} lists, but must have {num_rows}: the prompt's {num_tokens} tokens - 1 - "
            f"prompt_logprob_start ({start})",
            FIELD,
        )
    most = max(map(len, given), default=0)
    if not most or 0 <= max_logprobs < most:
        limit = "1 or more" if max_logprobs < 0 else f"1 to {max_logprobs}"
        raise InvalidRequest(
            f"the longest list of {FIELD} has {most} ids, but must have {limit} (--max-logprobs)", FIELD
        )
    lists = tuple(tuple(one for one in ids if one != _PAD) for ids in given)
    if every := tuple(one for ids in lists for one in ids):
        check_token_ids(every, tokens, FIELD)
    return lists


def matrix_of(given: Sequence[Sequence[int]], found: Sequence[TokenLogprobs | None]) -> str:
    """Return a float32 matrix as base64 of numpy's file format: a row for each list, -inf where a list has no token.

    `found` are the log probabilities of the whole prompt; its last positions are those of the lists.
    """
    width = max(map(len, given))
    values: list[float] = []
    for ids, one in zip(given, found[len(found) - len(given) :], strict=True):
        scores = iter(() if one is None else one.top_logprobs)
        row = [-math.inf if token_id == _PAD else next(scores) for token_id in ids]
        values += row + [-math.inf] * (width - len(row))
    described = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({len(given)}, {width}), }}"
    padding = -(len(_MAGIC) + 2 + len(described) + 1) % _ALIGNMENT
    header = (described + " " * padding + "\n").encode()
    content = _MAGIC + len(header).to_bytes(2, "little") + header + to_bytes(values, "float32", "little")
    return base64.b64encode(content).decode()
