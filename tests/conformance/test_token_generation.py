"""/inference/v1/generate and /reset_prefix_cache with a real model, combined and over P/D."""

import base64
import io
import json
from typing import Any

import numpy as np
import pytest

from tests.conformance.served import PROMPT, Compared, Oracle

pytestmark = pytest.mark.cluster

PATH = "/inference/v1/generate"


@pytest.mark.covers("B.tokens.1")
def test_ids_generated_from_ids_are_those_of_the_completion(compared: Compared, oracle: Oracle) -> None:
    sampling = {"max_tokens": 8, "temperature": 0, "logprobs": 2}
    body: dict[str, Any] = {"token_ids": oracle.ids(PROMPT), "sampling_params": sampling, "output_mode": "text"}
    completion = compared.completion(return_token_ids=True)["choices"][0]
    whole = compared.post(PATH, **body).json()["choices"][0]
    chunks = compared.post(PATH, **body, stream=True).text.split("\n\n")[:-2]
    streamed = [json.loads(chunk.removeprefix("data: "))["choices"][0] for chunk in chunks]

    assert (whole["token_ids"], whole["text"]) == (completion["token_ids"], completion["text"])
    assert [token_id for choice in streamed for token_id in choice["token_ids"]] == whole["token_ids"]
    assert "".join(choice["text"] for choice in streamed) == whole["text"]
    compared.agree("ids", whole["token_ids"])


@pytest.mark.covers("B.tokens.1")
def test_tokens_of_the_prompt_are_scored_as_by_transformers(compared: Compared, oracle: Oracle) -> None:
    ids = oracle.ids(PROMPT * 8)
    lists = [[token_id, 3, at % 300] for at, token_id in enumerate(ids[2:])]
    sampling = {"max_tokens": 2, "temperature": 0, "prompt_logprob_token_ids": lists, "prompt_logprob_start": 1}
    answer = compared.post(PATH, token_ids=ids, sampling_params=sampling).json()

    scores = np.load(io.BytesIO(base64.b64decode(answer["prompt_token_id_logprobs"])))
    expected = oracle.logprobs(ids)[1:-1]
    for row, chosen, found in zip(expected, lists, scores, strict=True):
        assert found == pytest.approx(row[chosen].tolist(), abs=1e-4)
    compared.agree("scores", scores.round(3).tolist())


@pytest.mark.covers("B.ops.8")
def test_nothing_is_found_in_the_prefix_cache_after_a_reset(compared: Compared) -> None:
    prompt, found = [7] * 100, list[Any]()
    for reset in (False, False, True, False):
        if reset:
            assert compared.http.post("/reset_prefix_cache").json() == {"success": True}
        answer = compared.completion(prompt, return_token_ids=True)
        found.append((answer["usage"]["prompt_tokens_details"], answer["choices"][0]["token_ids"]))

    details, outputs = zip(*found, strict=True)
    counts = [(one["cached_tokens"], one["created_cache_tokens"]) for one in details]
    assert counts == [(0, 96), (96, 0), (0, 96), (96, 0)]
    assert len(set(map(tuple, outputs))) == 1
