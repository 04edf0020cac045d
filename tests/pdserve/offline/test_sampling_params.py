"""SamplingParams and BeamSearchParams: vLLM's defaults, and errors for values out of their limits."""

import json
import re
from dataclasses import fields
from typing import Any

import pytest

from pdserve import (
    BeamSearchParams,
    GuidedDecodingParams,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from pdserve.offline.bodies import chat_logprobs, completion_logprobs, sampling_body
from scheduler.api.generation_body import CompletionBody
from wire.types import PARAMETERS

NAN = float("nan")


@pytest.mark.covers("A6.78")
def test_the_defaults_are_vllms_and_the_repr_makes_the_same_object() -> None:
    params = SamplingParams(temperature=0.8, top_p=0.95)

    assert (params.temperature, params.top_p) == (0.8, 0.95)
    rest = SamplingParams()
    assert (rest.n, rest.max_tokens, rest.temperature, rest.top_p, rest.top_k, rest.min_p) == (1, 16, 1.0, 1.0, 0, 0.0)
    assert (rest.repetition_penalty, rest.presence_penalty, rest.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (rest.seed, rest.stop, rest.logprobs, rest.prompt_logprobs, rest.ignore_eos) == (
        None,
        None,
        None,
        None,
        False,
    )
    assert repr(params).startswith("SamplingParams(n=1, ")
    assert "temperature=0.8, top_p=0.95, " in repr(params)
    assert eval(repr(params)) == params


@pytest.mark.covers("A6.78")
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"n": 0}, "n is 0, but must be a whole number of 1 or more"),
        ({"n": 2, "temperature": 0}, "n must be 1 when using greedy sampling (temperature 0 or top_k 1), got 2"),
        ({"n": 3, "best_of": 2}, "best_of 2 is less than n 3"),
        ({"temperature": -0.1}, "temperature is -0.1, but must be a number in [0, 2]"),
        ({"temperature": NAN}, "temperature is nan, but must be a number in [0, 2]"),
        ({"temperature": "1"}, "temperature is '1', but must be a number in [0, 2]"),
        ({"top_p": 0.0}, "top_p is 0.0, but must be in (0, 1]"),
        ({"top_p": 1.1}, "top_p is 1.1, but must be a number in [0, 1]"),
        ({"top_k": -2}, "top_k is -2, but must be a whole number of -1 or more"),
        ({"top_k": 1.5}, "top_k is 1.5, but must be a whole number of -1 or more"),
        ({"min_p": 2}, "min_p is 2, but must be a number in [0, 1]"),
        ({"presence_penalty": 3}, "presence_penalty is 3, but must be a number in [-2, 2]"),
        ({"frequency_penalty": -3}, "frequency_penalty is -3, but must be a number in [-2, 2]"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0, but must be a number in [0.01, 100]"),
        ({"max_tokens": 0}, "max_tokens is 0, but must be a whole number of 1 or more"),
        ({"max_tokens": True}, "max_tokens is True, but must be a whole number of 1 or more"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens 5 is more than max_tokens 4"),
        ({"logprobs": -2}, "logprobs is -2, but must be a whole number of -1 or more"),
        ({"stop": ["a", ""]}, "stop contains an empty string"),
        ({"stop": "a", "detokenize": False}, "stop needs detokenize"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0, but must be -1, or 1 or more"),
        ({"use_beam_search": True}, "use_beam_search needs n or best_of of 2 or more, got 1"),
        ({"logits_processors": [max]}, "logits_processors is not supported: the engine may be"),
        ({"repetition_detection": 5}, "repetition_detection is 5, but must be RepetitionDetectionParams or a mapping"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured outputs have 2 of json, regex, choice"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_out_of_range_values_are_refused_with_value_and_limit(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        SamplingParams(**wrong)


def test_every_wire_parameter_is_a_field_here_and_over_http() -> None:
    assert set(PARAMETERS) <= {field.name for field in fields(SamplingParams)}
    assert set(PARAMETERS) <= set(CompletionBody.model_fields)


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="max_token"):
        SamplingParams(max_token=5)  # type: ignore[call-arg]


def test_a_clone_shares_nothing_and_none_means_the_default() -> None:
    params = SamplingParams.from_optional(stop=["a"], temperature=None, max_tokens=3)
    other = params.clone()
    assert isinstance(other.stop, list)
    other.stop.append("b")

    assert (params.stop, params.temperature, params.max_tokens) == (["a"], 1.0, 3)


def test_beam_search_params_have_their_own_limits() -> None:
    assert BeamSearchParams(beam_width=4, max_tokens=8).length_penalty == 1.0
    known: dict[str, Any] = {"beam_width": 2, "max_tokens": 2}
    for name, value in (
        ("beam_width", 0), ("max_tokens", 0), ("max_tokens", None), ("temperature", 0.5), ("length_penalty", 101),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"{name} is {value}"):
            BeamSearchParams(**known | {name: value})


def test_structured_outputs_have_both_names() -> None:
    requests = StructuredOutputsParams(choice=["a", "b"])

    assert requests.body() == GuidedDecodingParams(choice=["a", "b"]).body() == {"choice": ["a", "b"]}
    with pytest.raises(ValueError, match=r"have 0 of json, regex, .*: use exactly one"):
        StructuredOutputsParams()


NEWEST = {
    # Fields of vLLM's SamplingParams at the end of 2026 that its older versions lack.
    "watermarking", "prompt_logprob_start", "prompt_logprob_token_ids", "logprob_token_ids",
    "output_kind", "stream_interval", "skip_clone", "extra_args", "skip_reading_prefix_cache", "thinking_token_budget",
    "repetition_detection", "routed_experts_prompt_start", "trace_decode_token_ids",
}  # fmt: skip
WITHOUT_EFFECT: dict[str, Any] = {
    "output_kind": RequestOutputKind.FINAL_ONLY, "stream_interval": 8, "skip_clone": True,
    "skip_reading_prefix_cache": True, "routed_experts_prompt_start": 3,
}  # fmt: skip
REFUSED: dict[str, Any] = {
    "watermarking": True, "prompt_logprob_start": 1, "prompt_logprob_token_ids": [1],
    "extra_args": {"a": 1}, "trace_decode_token_ids": [1],
}  # fmt: skip


TAKEN: dict[str, tuple[Any, Any]] = {
    "logprob_token_ids": ([5, 9], [5, 9]),
    "thinking_token_budget": (9, 9),
    "repetition_detection": (
        RepetitionDetectionParams(max_pattern_size=4, min_count=2),
        {"max_pattern_size": 4, "min_pattern_size": 0, "min_count": 2},
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_new_field_is_sent_as_the_server_expects_it(name: str) -> None:
    given, sent = TAKEN[name]

    assert sampling_body(SamplingParams(**{name: given}), max_tokens=16, seed=None)[name] == sent


def test_only_listed_tokens_are_returned_with_each_output() -> None:
    params = SamplingParams(logprob_token_ids=[5])

    assert completion_logprobs(params) == {"logprobs": 0}
    assert chat_logprobs(params) == {"logprobs": True, "top_logprobs": 0}
    assert completion_logprobs(SamplingParams()) == chat_logprobs(SamplingParams()) == {}


def test_each_new_vllm_field_is_accepted_or_refused() -> None:
    assert {*WITHOUT_EFFECT, *REFUSED, *TAKEN} == NEWEST
    taken = SamplingParams(**WITHOUT_EFFECT, watermarking=False, extra_args={}, thinking_token_budget=None)
    plain = sampling_body(SamplingParams(), max_tokens=16, seed=None)

    assert sampling_body(taken, max_tokens=16, seed=None) == plain
    for name, value in REFUSED.items():
        with pytest.raises(ValueError, match=f"^{name} is not supported: [a-z]"):
            SamplingParams(**{name: value})


def test_beam_search_refuses_structured_outputs_and_watermarking() -> None:
    with pytest.raises(ValueError, match="structured_outputs is not supported for beams"):
        BeamSearchParams(2, 4, structured_outputs={"regex": "a"})
    with pytest.raises(ValueError, match="watermarking is not supported"):
        BeamSearchParams(2, 4, watermarking=True)


@pytest.mark.parametrize("given", [dict, json.dumps])
def test_a_schema_is_closed_unless_it_says_otherwise(given: Any) -> None:
    inner = {"type": "object", "properties": {"c": {"type": "string"}}}
    open_ = {"properties": {}, "additionalProperties": True}
    schema = {"type": "object", "properties": {"a": {"anyOf": [inner, open_]}, "b": {"type": "object"}}}

    body = StructuredOutputsParams(json=given(schema), disable_additional_properties=True).body()

    closed = {**inner, "additionalProperties": False}
    properties = {"a": {"anyOf": [closed, open_]}, "b": {"type": "object"}}
    assert body == {"json": {"type": "object", "properties": properties, "additionalProperties": False}}
