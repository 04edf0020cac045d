"""Log probabilities without a JSON number."""

import json
import math

import pytest

from scheduler.api.logprobs import TokenFormatter
from scheduler.tokens import Tokens
from wire.types import TokenLogprobs

IMPOSSIBLE = TokenLogprobs(-math.inf, 3, (5, 6), (-0.5, -math.inf))


@pytest.mark.covers("B.logprobs.3")
def test_an_impossible_tokens_logprob_is_a_number(tokens: Tokens) -> None:
    formatter = TokenFormatter(tokens.texts, 2)

    completion, chat = formatter.completion([(7, IMPOSSIBLE)], [0]), formatter.chat([(7, IMPOSSIBLE)])
    prompt = formatter.prompt([(7, IMPOSSIBLE)])

    assert completion["token_logprobs"] == [-9999.0]
    assert sorted(completion["top_logprobs"][0].values()) == [-9999.0, -9999.0, -0.5]
    entry = chat["content"][0]
    assert [entry["logprob"], *(other["logprob"] for other in entry["top_logprobs"])] == [-9999.0, -0.5, -9999.0]
    assert (prompt[0]["7"]["logprob"], prompt[0]["6"]["logprob"]) == (-9999.0, -9999.0)
    json.dumps([completion, chat, prompt], allow_nan=False)
