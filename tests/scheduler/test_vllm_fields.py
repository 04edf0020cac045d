"""Every field of vLLM 0.33's request classes: implemented, refused with the reason, or without effect by its nature."""

from typing import Any

import pytest

from scheduler.api.embeddings import EmbeddingBody
from scheduler.api.generation_body import ChatBody, CompletionBody
from scheduler.api.pooling import TaskBody
from scheduler.api.refusals import NOT_SERVED, TRANSFER_FIELDS, WITHOUT_EFFECT
from scheduler.api.rerank import RerankBody
from scheduler.api.score import ScoreBody
from scheduler.api.token_generation import TokensBody, TokensSamplingBody

SHARED = [
    "model", "echo", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "n", "presence_penalty", "seed",
    "stop", "stream", "stream_options", "temperature", "top_p", "user", "use_beam_search", "top_k", "min_p",
    "repetition_penalty", "watermarking", "length_penalty", "stop_token_ids", "include_stop_str_in_output",
    "ignore_eos", "min_tokens", "skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens",
    "truncation_side", "allowed_token_ids", "prompt_logprobs", "logprob_token_ids", "bad_words",
    "add_special_tokens", "response_format", "structured_outputs", "priority", "request_id", "session_id",
    "return_tokens_as_token_ids", "return_token_ids", "return_weight_versions", "routed_experts_prompt_start",
    "return_token_offsets", "mm_payload", "return_mm_kwargs", "cache_salt", "kv_transfer_params",
    "ec_transfer_params", "vllm_xargs", "repetition_detection", "thinking_token_budget", "stream_interval",
]  # fmt: skip
COMPLETION = [
    "prompt", "suffix", "prompt_embeds",
]  # fmt: skip
CHAT = [
    "messages", "top_logprobs", "max_completion_tokens", "tools", "tool_choice", "reasoning_effort",
    "include_reasoning", "parallel_tool_calls", "add_generation_prompt", "continue_final_message", "documents",
    "chat_template", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "return_prompt_text",
]  # fmt: skip
"""The names of CompletionRequest's and ChatCompletionRequest's fields in the wheel vllm 0.33.0."""

POOLING = [
    "model", "user", "truncate_prompt_tokens", "padding", "truncation_side", "request_id", "priority",
    "mm_processor_kwargs", "cache_salt", "use_activation", "chat_template_kwargs",
]  # fmt: skip
EMBEDDING = [
    "input", "add_special_tokens", "encoding_format", "embed_dtype", "endianness", "dimensions", "messages",
    "add_generation_prompt", "continue_final_message", "chat_template", "media_io_kwargs", "late_chunking_params",
]  # fmt: skip
SCORE = [
    "text_1", "text_2", "data_1", "data_2", "queries", "documents", "items", "max_tokens_per_query",
    "max_tokens_per_doc", "instruction",
]  # fmt: skip
"""Embedding*Request, and Score*Request with its four pairs of names."""
RERANK = ["query", "documents", "top_n", "max_tokens_per_query", "max_tokens_per_doc", "instruction"]
TASK = [*EMBEDDING, "task"]
CLASSIFY = [
    "input", "add_special_tokens", "messages", "add_generation_prompt", "continue_final_message", "chat_template",
    "media_io_kwargs",
]  # fmt: skip
"""RerankRequest, Pooling*Request and Classification*Request."""

TOKENS = [
    "request_id", "token_ids", "token_offsets", "features", "content_parts", "sampling_params", "model",
    "reasoning_ended", "reasoning_parser_kwargs", "return_token_ids", "output_mode", "parse_context", "stream",
    "stream_options", "cache_salt", "priority", "kv_transfer_params", "ec_transfer_params",
]  # fmt: skip
SAMPLING = [
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "watermarking", "top_p",
    "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens", "logprobs",
    "prompt_logprobs", "logprob_token_ids", "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
    "include_stop_str_in_output", "stream_interval", "structured_outputs", "logit_bias", "allowed_token_ids",
    "extra_args", "bad_words", "skip_reading_prefix_cache", "thinking_token_budget", "repetition_detection",
    "routed_experts_prompt_start", "prompt_logprob_token_ids", "prompt_logprob_start", "flat_logprobs",
    "output_kind", "skip_clone", "output_text_buffer_length", "trace_decode_token_ids",
]  # fmt: skip
"""Of /inference/v1/generate: GenerateRequest's, and those of SamplingParams, which is a field of it."""

MESSAGES = [{"role": "user", "content": "hi"}]
EMBED: dict[str, Any] = {"input": "hi"}
PAIR: dict[str, Any] = {"text_1": "hi", "text_2": "hi"}
REFUSED = [
    (path, known, name, *verdict)
    for path, known, kind in (
        ("/v1/chat/completions", {"messages": MESSAGES}, ChatBody),
        ("/v1/embeddings", EMBED, EmbeddingBody),
        ("/v1/score", PAIR, ScoreBody),
        ("/rerank", {"query": "hi", "documents": ["hi"]}, RerankBody),
        ("/pooling", EMBED, TaskBody),
    )
    for name, verdict in kind.not_served.items()
    if (kind is ChatBody or name not in NOT_SERVED)
]


@pytest.mark.parametrize(
    ("names", "body"),
    [
        ([*SHARED, *COMPLETION], CompletionBody),
        ([*SHARED, *CHAT], ChatBody),
        ([*POOLING, *EMBEDDING], EmbeddingBody),
        ([*POOLING, *SCORE], ScoreBody),
        (TOKENS, TokensBody),
        (SAMPLING, TokensSamplingBody),
    ],
    ids=["text", "chat", "vectors", "scores", "tokens", "sampling"],
)
def test_each_field_has_one_verdict(names: list[str], body: Any) -> None:
    tables = [set(body.model_fields), set(body.not_served), set(TRANSFER_FIELDS), set(WITHOUT_EFFECT)]

    verdicts = {name: sum(name in table for table in tables) for name in names}
    assert {name for name, count in verdicts.items() if count != 1} == set()


@pytest.mark.usefixtures("one_renderer")
@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "known", "name", "neutral", "reason"), REFUSED, ids=[f"{row[0]} {row[2]}" for row in REFUSED]
)
async def test_a_refused_field_has_a_reason_and_passes_with_neutral_values(
    serve: Any, path: str, known: dict[str, Any], name: str, neutral: tuple[Any, ...], reason: str
) -> None:
    async with serve() as served:
        refused = await served.client.post(path, json=known | {name: "x"})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"], error["message"]) == (400, name, f"{name}: {reason}")
        for value in (None, *neutral):
            passed = await served.client.post(path, json=known | {name: value})
            assert passed.status_code == 200, passed.text
            assert "warning" not in passed.headers


@pytest.mark.usefixtures("one_renderer")
@pytest.mark.anyio
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_token", "max_tokens"), ("temprature", "temperature"), ("repetition_detect", "repetition_detection"),
        ("unheard_of", None), ("nvext", None), ("session_id", None), ("metadata", None), ("x\n", None),
        ("a" * 999, None),
    ],
)  # fmt: skip
async def test_a_warning_names_the_known_field_for_a_misspelled_one(serve: Any, name: str, meant: str | None) -> None:
    async with serve() as served:
        for stream in (False, True):
            body = {"messages": MESSAGES, "stream": stream, name: 1}
            answer = await served.client.post("/v1/chat/completions", json=body)

            warning = (
                None
                if meant is None
                else (f'199 pdserve "{name} is not a known field and has no effect: did you mean {meant}?"')
            )
            assert (answer.status_code, answer.headers.get("warning")) == (200, warning)


@pytest.mark.anyio
@pytest.mark.parametrize(("header", "shown"), [({}, "mine"), ({"x-request-id": "of-header"}, "of-header")])
@pytest.mark.parametrize(
    ("path", "known", "kind"),
    [("/v1/completions", {"prompt": "San"}, "cmpl"), ("/v1/embeddings", EMBED, "embd"), ("/v1/score", PAIR, "score")],
)
async def test_a_bodys_request_id_ends_the_answers_id(
    serve: Any, path: str, known: dict[str, Any], kind: str, header: dict[str, str], shown: str
) -> None:
    async with serve() as served:
        answer = await served.client.post(path, json=known | {"request_id": "mine"}, headers=header)

        assert answer.json()["id"] == f"{kind}-{shown}"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "known"), [("/v1/completions", {"prompt": "San"}), ("/v1/embeddings", EMBED), ("/v1/score", PAIR)]
)
async def test_a_cache_salt_separates_the_kv_that_is_shared(serve: Any, path: str, known: dict[str, Any]) -> None:
    async with serve() as served:
        for salt in ("a", "a", "b", None):
            await served.client.post(path, json=known | {"cache_salt": salt})
        wrong = await served.client.post(path, json=known | {"cache_salt": "b c"})

        first, again, other, none = (request.cache_salt for request in served.dispatcher.requests)
        assert first == again
        assert len({first, other, none}) == 3
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "cache_salt")


@pytest.mark.anyio
async def test_listed_tokens_have_their_log_probabilities(serve: Any) -> None:
    async with serve("hello") as served:
        listed = {"logprob_token_ids": [9, 5, 9], "return_tokens_as_token_ids": True, "return_token_ids": True}
        text = await served.client.post("/v1/completions", json={"prompt": "San", "logprobs": 1} | listed)
        chat = {"messages": MESSAGES, "logprobs": True} | listed
        choice = (await served.client.post("/v1/chat/completions", json=chat)).json()["choices"][0]

        own = served.ids("hello")[0]
        reported = text.json()["choices"][0]["logprobs"]
        assert reported["top_logprobs"][0] == pytest.approx(
            {"token_id:9": -0.09, "token_id:5": -0.05, f"token_id:{own}": -own / 100}
        )
        alternatives = [one["token"] for one in choice["logprobs"]["content"][0]["top_logprobs"]]
        assert alternatives == [f"token_id:{own}", "token_id:9", "token_id:5"]
        assert [one["rank"] for one in reported["ranked"][0].values()] == [own, None, None]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"logprob_token_ids": [384], "logprobs": 1}, "logprob_token_ids"),
        ({"logprob_token_ids": list(range(129)), "logprobs": 1}, "logprob_token_ids"),
        ({"logprob_token_ids": [5], "logprobs": 1, "echo": True}, "logprob_token_ids"),
        ({"repetition_detection": {"max_pattern_size": 3}}, "repetition_detection.min_count"),
        (
            {"repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2}},
            "repetition_detection.min_pattern_size",
        ),
        ({"repetition_detection": {"max_pattern_size": 1025, "min_count": 2}}, "repetition_detection.max_pattern_size"),
        ({"repetition_detection": {"max_pattern_size": 3, "min_count": 2**31}}, "repetition_detection.min_count"),
        ({"repetition_detection": 3}, "repetition_detection"),
    ],
)  # fmt: skip
async def test_fields_that_cannot_be_listed_or_detected_are_400(serve: Any, fields: Any, param: str) -> None:
    async with serve() as served:
        answer = await served.client.post("/v1/completions", json={"prompt": "San"} | fields)

        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
        assert "must be at least 2" not in answer.text
