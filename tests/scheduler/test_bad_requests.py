"""Invalid requests: always an OpenAI error body that names the field, never 422, never a crash."""

import time
from typing import Any

import pytest

from telemetry.capped_logs import LINES

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_renderer")]

CHAT = {"messages": [{"role": "user", "content": "hello"}]}

PARTS = "too many objects, arrays and members of objects: the limit is 262144"
VALUES = "too many values: the limit is 1048576"

BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 2**31}, "max_tokens"),
    ({"max_tokens": 2**70}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 1.1}, "min_p"),
    ({"seed": 2**63}, "seed"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 17}, "n"),
    ({"n": 10**9}, "n"),
    ({"n": "3"}, "n"),
    ({"n": True}, "n"),
    ({"n": 2, "temperature": 0}, "n"),
    ({"n": 2, "top_k": 1}, "n"),
    ({"best_of": 2, "temperature": 0}, "best_of"),
    ({"best_of": 17}, "best_of"),
    ({"best_of": 10**6}, "best_of"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"min_tokens": 10**9}, "min_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": "x" * 257}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop_token_ids": [384]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": ["x"]}, "stop_token_ids.0"),
    ({"stop_token_ids": list(range(129))}, "stop_token_ids"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": "yes"}, "stream"),
    ({"model": 3}, "model"),
    ({"kv_transfer_params": {}}, "kv_transfer_params"),
    ({"ticket": "0" * 32}, "ticket"),
    ({"remote_host": "10.0.0.9"}, "remote_host"),
    ({"tools": []}, "tools"),
    ({"use_beam_search": True, "temperature": 0}, "n"),
    ({"use_beam_search": True, "temperature": 0, "n": 1}, "n"),
    ({"use_beam_search": True, "n": 2, "logprobs": 21}, "logprobs"),
    ({"use_beam_search": True, "n": 2, "temperature": 0.5}, "temperature"),
    ({"use_beam_search": True, "n": 2, "temperature": 0, "top_p": 0.9}, "top_p"),
    ({"use_beam_search": True, "n": 2, "temperature": 0, "top_k": 3}, "top_k"),
    ({"use_beam_search": True, "n": 2, "temperature": 0, "stream": True}, "stream"),
    ({"use_beam_search": True, "n": 2, "temperature": 0, "guided_regex": "a"}, "use_beam_search"),
    ({"length_penalty": 0.5}, "length_penalty"),
    ({"early_stopping": True}, "early_stopping"),
    ({"early_stopping": "soon"}, "early_stopping"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"frequency_penalty": 1e308}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"384": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1, "-1": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 30: 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [384]}, "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words.0"),
    ({"bad_words": [" "]}, "bad_words"),
    ({"bad_words": ["a"] * 129}, "bad_words"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 513}, "truncate_prompt_tokens"),
    ({"truncation_side": "middle"}, "truncation_side"),
    ({"prompt_logprobs": -2}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"guided_json": 3}, "guided_json"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_regex": 3}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": "yes"}, "guided_choice"),
    ({"guided_json": "{}", "guided_regex": "a"}, "guided_json"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": "json_object"}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_object", "value": 3}}, "response_format.value"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["x"] * 2**15}}, "structured_outputs.choice"),
    ({"structured_outputs": {"regex": "x" * (2**16 + 1)}}, "structured_outputs.regex"),
    ({"guided_json": {"enum": ["x" * 2**16]}}, "guided_json"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 2**16]}}}},
        "response_format.json_schema",
    ),
    ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
    ({"cache_salt": "a b"}, "cache_salt"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 129}, "cache_salt"),
    ({"priority": 2**31}, "priority"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ({"logits_processors": ["os.system"]}, "logits_processors"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_FIELDS)
async def test_a_bad_field_is_400_that_names_it_on_both_surfaces(serve: Any, fields: Any, param: str) -> None:
    async with serve() as served:
        for path, base in (("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", CHAT)):
            response = await served.client.post(path, json={"model": served.model} | base | fields)

            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (400, 400, param), response.text
            assert error["type"] == "invalid_request_error"
            assert param.split(".", maxsplit=1)[0] in error["message"]
        assert served.dispatcher.requests == []


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        ("/v1/completions", {"allowed_token_ids": [1] + ["a"] * 2000}, "allowed_token_ids.1: input should be a valid"),
        (
            "/v1/completions",
            {"guided_choice": [1] * 2000},
            "guided_choice.0: input should be a valid string, got 1 (string_type)",
        ),
        (
            "/v1/chat/completions",
            {"documents": [1] * 2000},
            "documents.0: input should be a valid dictionary, got 1 (dict_type)",
        ),
        ("/detokenize", {"tokens": [True] * 2000}, "tokens.0: input should be a valid integer, got True (int_type)"),
        (
            "/v1/completions",
            {"logit_bias": {str(i): "a" for i in range(2000)}},
            "2000 values of the body are invalid, but at most 1000 are reported: check the types of its fields",
        ),
    ],
    ids=["ids", "choices", "documents", "tokens", "bias"],
)
async def test_many_wrong_values_are_not_described_one_by_one(serve: Any, path: str, fields: Any, words: str) -> None:
    """A description costs 2 us: a million of them would block all other requests."""
    async with serve() as served:
        error = (await served.client.post(path, json={"prompt": "a"} | fields)).json()["error"]

        assert (error["code"], error["message"].count(";")) == (400, 0)
        assert error["message"].startswith(words)


@pytest.mark.parametrize(
    "prompt",
    [
        None, "", [], [[]], ["a", ""], [1, "a"], [True], [[1], []], [["a"]], {"a": 1}, 3, [384], [-1], [[384]],
        ["a"] * 65,
    ],
)  # fmt: skip
async def test_an_invalid_prompt_is_400(serve: Any, prompt: Any) -> None:
    async with serve() as served:
        response = await served.client.post("/v1/completions", json={"model": served.model, "prompt": prompt})

        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == "prompt"


async def test_a_token_id_out_of_vocabulary_is_named_with_the_limit(serve: Any) -> None:
    async with serve() as served:
        response = await served.client.post("/v1/completions", json={"model": served.model, "prompt": [5, 384]})

        assert "384 is out of vocabulary: ids are 0..383" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "messages",
    [
        None, [], {}, "hi", [3], [{}], [{"role": "user"}], [{"role": 3, "content": "a"}],
        [{"role": "user", "content": []}], [{"role": "user", "content": [3]}],
        [{"role": "user", "content": [{"type": "text"}]}], [{"role": "tool", "content": "42"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://10.0.0.1/"}}]}],
    ],
)  # fmt: skip
async def test_invalid_messages_are_400(serve: Any, messages: Any) -> None:
    async with serve() as served:
        response = await served.client.post("/v1/chat/completions", json={"model": served.model, "messages": messages})

        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"].startswith("messages")


async def test_a_prompt_that_leaves_no_room_is_400_with_both_numbers(serve: Any) -> None:
    async with serve() as served:
        for prompt, shown in (
            ([5] * 600, "; the prompt has 600"),
            ([5] * 512, "; the prompt has 512"),
            ("a b " * 5000, ""),
        ):
            body = {"model": served.model, "prompt": prompt, "max_tokens": 1}
            response = await served.client.post("/v1/completions", json=body)

            assert response.status_code == 400
            assert f"maximum context length is 512 tokens{shown}" in response.json()["error"]["message"]


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 13}, {"max_tokens": 512}, {"max_completion_tokens": 13}])
async def test_max_tokens_shrinks_to_the_context_left(serve: Any, fields: Any) -> None:
    async with serve() as served:
        response = await served.client.post(
            "/v1/completions", json={"model": served.model, "prompt": [5] * 510} | fields
        )

        assert response.status_code == 200, response.text
        assert served.dispatcher.requests[0].params.max_tokens == 2


async def test_max_tokens_beyond_the_model_alone_is_400(serve: Any) -> None:
    async with serve() as served:
        body = {"model": served.model, "prompt": "hi", "max_tokens": 513}
        error = (await served.client.post("/v1/completions", json=body)).json()["error"]

        assert (error["param"], error["message"]) == (
            "max_tokens", "max_tokens is 513; this model's maximum context length is 512 tokens, prompt and output",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("seed", "kind"),
    [
        ("18446744073709551617", "less_than_equal"), ("-99999999999999999999", "greater_than_equal"),
        ("9223372036854775808", "less_than_equal"), ("1e30", "int_type"), ("2.5", "int_type"),
    ],
)  # fmt: skip
async def test_a_seed_out_of_range_is_quoted_as_typed(serve: Any, seed: str, kind: str) -> None:
    async with serve() as served:
        answer = await served.client.post("/v1/completions", content=f'{{"prompt": "hi", "seed": {seed}}}')

        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "seed")
        assert error["message"].endswith(f", got {seed.replace('1e30', '1e+30')} ({kind})")


async def test_an_unknown_model_is_404(serve: Any) -> None:
    async with serve() as served:
        unknown = await served.client.post("/v1/completions", json={"model": "gpt-9", "prompt": "hi"})

        assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "model")


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"null", b'"a"', b'{"a": NaN}', b'{"a": 1e400}', b"\xff\xfe", b'{"a": "\xff"}',
        b"[" * 100_000, b'{"tools": ' + b"[" * 900 + b"]" * 900 + b"}", b'{"a": ' + b'{"a": ' * 64 + b"1" + b"}" * 65,
    ],
)  # fmt: skip
async def test_a_body_that_is_not_a_sane_json_object_is_400(serve: Any, content: bytes) -> None:
    async with serve() as served:
        response = await served.client.post(
            "/v1/completions", content=content, headers={"content-type": "application/json"}
        )

        assert response.status_code == 400, response.text
        assert response.json()["error"]["type"] == "invalid_request_error"


async def test_the_last_of_two_equal_keys_counts(serve: Any) -> None:
    async with serve() as served:
        twice = b'{"model": "x", "prompt": "hi", "max_tokens": 3, "max_tokens": 2, "model": "%b"}'
        content = twice % served.model.encode()
        response = await served.client.post("/v1/completions", content=content)

        assert response.status_code == 200, response.text
        assert served.dispatcher.requests[0].params.max_tokens == 2


@pytest.mark.parametrize(
    ("number", "status"),
    [
        pytest.param(b"9" * 1_000_000, 400, id="an integer"),
        pytest.param(b"1e" + b"9" * 1_000_000, 400, id="an exponent"),
        pytest.param(b"0." + b"9" * 1_000_000, 200, id="a fraction"),
        pytest.param(b"1" + b"0" * 300 + b', "y": 0.' + b"9" * 1_000_000, 200, id="beside one parsed again"),
    ],
)
async def test_a_number_of_a_megabyte_costs_no_time(serve: Any, number: bytes, status: int) -> None:
    async with serve() as served:
        body = b'{"model": "%b", "prompt": "hi", "x": %b}' % (served.model.encode(), number)
        began_s = time.process_time()
        answer = await served.client.post("/v1/completions", content=body)
        used_s = time.process_time() - began_s

        assert answer.status_code == status, answer.text
        assert used_s < 1.0, "of CPU time: it was 3.7 s"


@pytest.mark.covers("B.errors.7")
async def test_a_body_over_the_limit_is_413(serve: Any) -> None:
    async with serve(max_body_bytes=1000) as served:
        response = await served.client.post("/v1/completions", json={"model": served.model, "prompt": "a" * 1000})

        assert (response.status_code, response.json()["error"]["code"]) == (413, 413)
        assert "1000 bytes" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("many", "limit"),
    [
        pytest.param(b"[" + b"[]," * 300_000 + b"1]", PARTS, id="arrays"),
        pytest.param(b"[" + b'{"a":1},' * 140_000 + b"1]", PARTS, id="objects"),
        pytest.param(b'{"k":0' + b',"k":0' * 270_000 + b"}", PARTS, id="members"),
        pytest.param(b"[" + b"1," * 7_000_000 + b"1]", VALUES, id="values"),
    ],
)
async def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(serve: Any, many: bytes, limit: str) -> None:
    async with serve() as served:
        body = b'{"model": "%b", "prompt": "hi", "user": "a \\" b \\\\", "x": %b}' % (served.model.encode(), many)
        answer = await served.client.post("/v1/completions", content=body)

        assert answer.status_code == 400
        assert limit in answer.text


async def test_braces_in_a_long_text_are_not_counted_as_values(serve: Any) -> None:
    code = "def f(a: int) -> list: return [{'a\\\\\"': [a]}]\n" * 70_000 + "," * 1_100_000
    async with serve("hello") as served:
        answer = await served.client.post(
            "/v1/completions", json={"model": served.model, "prompt": "hi", "user": code, "x": [1] * 300_000}
        )

        assert answer.status_code == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; x", "nonsense"]
)
async def test_a_body_that_is_not_sent_as_json_is_415(serve: Any, kind: str) -> None:
    async with serve() as served:
        answer = await served.client.post("/v1/completions", content=b"{}", headers={"content-type": kind})

        assert answer.status_code == 415
        assert "send application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/completions", 405), ("DELETE", "/v1/models", 405), ("GET", "/", 404), ("GET", "/docs", 404),
        ("POST", "/v1/nothing", 404), ("GET", "//v1/models", 404),
        ("GET", "/v1/models/", 404), ("POST", "/v3/embed", 404), ("GET", "/rerank", 405),
    ],
)  # fmt: skip
async def test_wrong_paths_and_methods_get_a_json_error(serve: Any, method: str, path: str, status: int) -> None:
    async with serve() as served:
        response = await served.client.request(method, f"http://test{path}")

        assert (response.status_code, response.json()["error"]["code"]) == (status, status)


async def test_a_wrong_path_or_method_gets_the_valid_ones(serve: Any) -> None:
    async with serve() as served:
        path = await served.client.post("/v1/" + "x" * 500)
        method = await served.client.get("/v1/completions")

        assert path.json()["error"]["message"] == f"no such path: POST /v1/{'x' * 124}; /openapi.json lists the paths"
        assert method.json()["error"]["message"] == "/v1/completions does not accept GET; it accepts POST"


@pytest.mark.parametrize(
    ("given", "shown"),
    [("abc-1", "abc-1"), ("a b\x1b[31m<x>", "ab31mx"), ("x" * 500, "x" * 128), ("<>", None), (None, None)],
)
async def test_the_clients_request_id_is_only_echoed_and_sanitised(serve: Any, given: str | None, shown: Any) -> None:
    async with serve() as served:
        headers = {} if given is None else {"x-request-id": given}
        body = {"model": served.model, "prompt": "hi"}
        response = await served.client.post("/v1/completions", json=body, headers=headers)

        echoed = response.headers["x-request-id"]
        assert echoed == shown if shown else (echoed[:4], len(echoed)) == ("req-", 32)
        assert given is None or given not in served.dispatcher.requests[0].request_id


async def test_the_config_sets_the_limits(serve: Any) -> None:
    async with serve(max_n=2, max_prompts=2, max_stop_strings=1, max_stop_chars=3) as served:
        answers = [
            await served.client.post("/v1/completions", json={"model": served.model, "prompt": "a"} | fields)
            for fields in ({"n": 3}, {"prompt": ["a"] * 3}, {"stop": ["a", "b"]}, {"stop": "abcd"}, {"n": 2})
        ]

        assert [answer.status_code for answer in answers] == [400, 400, 400, 400, 200]


async def test_a_large_body_is_parsed_and_refused_by_its_length_alone(serve: Any) -> None:
    async with serve() as served:
        nested = await served.client.post("/v1/completions", json={"model": served.model, "prompt": [[5] * 200_000]})
        broken = await served.client.post(
            "/v1/completions", content=b"[" + b"1," * 200_000, headers={"content-type": "application/json"}
        )

        assert (nested.status_code, broken.status_code) == (400, 400)
        assert "the prompt has 200000" in nested.json()["error"]["message"]


async def test_refusals_do_not_fill_the_log(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "pdserve.api")
    async with serve() as served:
        for number in range(100):
            reply = await served.client.post("/v1/chat/completions", json=CHAT | {"model": f"no such model {number}"})
            assert reply.status_code == 404

            known = await served.client.post("/v1/chat/completions", json=CHAT | {"temprature": number})
            assert known.headers["warning"].startswith('199 pdserve "temprature is not a known field')

    assert sum(line.startswith("request_refused") for line in caplog.messages) == LINES
    assert sum(line.startswith("unknown_fields") for line in caplog.messages) == LINES
