"""The rows of the routes in docs/conformance.md: requests, and the ways of serving that must answer them the same."""

import base64
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.images.image_files import file_of, image_of

WAYS = {
    "combined": "combined", "shm": "P/D by shared memory", "tcp": "P/D by TCP", "killed": "D killed in the middle",
}  # fmt: skip
"""Each way of serving: its name in a test's id, and its column."""


@dataclass(frozen=True, slots=True)
class RouteRow:
    """A request. D is killed as it computes its `killed_at`-th token; None where D takes no part."""

    name: str
    route: str
    what: str
    body: Mapping[str, Any]
    killed_at: int | None


CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
TOKENS, INVOCATIONS, GENERATE = "/inference/v1/generate", "/invocations", "/generate"
BUDGET = 10
"""Tokens of thinking."""
CUT = 30
"""Tokens after which a call is cut."""
CITIES = ["Paris", "Rome"]
_CITY = {
    "type": "object", "properties": {"city": {"type": "string", "enum": CITIES}, "cold": {"type": "boolean"}},
    "required": ["city", "cold"], "additionalProperties": False,
}  # fmt: skip
_WEATHER, _NOW = {"name": "weather", "parameters": _CITY}, {"name": "now"}
_TOOLS = [{"type": "function", "function": one} for one in (_WEATHER, _NOW)]
_NAMED = {"type": "function", "function": {"name": "weather"}}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": _CITY}}
_GREEDY = {"temperature": 0, "max_tokens": 200}
_ASK = _GREEDY | {"messages": [{"role": "user", "content": "hello, how are you today?"}]}
_PLAIN = _ASK | {"chat_template_kwargs": {"enable_thinking": False}}
_PROMPT = {"prompt": "the quick brown fox", "max_tokens": 30, "ignore_eos": True, "return_token_ids": True}
_INPUTS = [{**one, "input_schema": one.get("parameters", {"type": "object"})} for one in (_WEATHER, _NOW)]
_MESSAGE_TOOLS = [{name: one[name] for name in ("name", "input_schema")} for one in _INPUTS]
_KEPT = {"temperature": 0, "max_output_tokens": 200, "input": "hello, how are you today?"}
_RESPOND = _KEPT | {"store": False}
_RESPONSE_TOOLS = [{"type": "function", **one} for one in (_WEATHER, _NOW)]

ROWS = (
    RouteRow("chat", CHAT, "content and log probabilities", _PLAIN | {"logprobs": True, "top_logprobs": 2}, 9),
    RouteRow(
        "choices", CHAT, "two choices, sampled with a seed",
        _PLAIN | {"n": 2, "temperature": 2, "seed": 5, "max_tokens": 30, "ignore_eos": True, "return_token_ids": True},
        20,
    ),
    RouteRow("thinking", CHAT, "thinking", _ASK, 12),
    RouteRow("budget", CHAT, "thinking with a budget", _ASK | {"thinking_token_budget": BUDGET}, BUDGET // 2),
    RouteRow("calls", CHAT, "calls that the model decides on, after its thinking", _ASK | {"tools": _TOOLS}, 27),
    RouteRow(
        "choices-calls", CHAT, "two choices with calls",
        _ASK | {"tools": _TOOLS, "n": 2, "temperature": 0.1, "seed": 5}, 54,
    ),
    RouteRow("cut", CHAT, "a call cut by max_tokens", _ASK | {"tools": _TOOLS, "max_tokens": CUT}, 24),
    RouteRow(
        "stops", CHAT, "a stop string inside a call, which it does not cut", _ASK | {"tools": _TOOLS, "stop": ["days"]},
        35,
    ),
    RouteRow("required", CHAT, "a required call", _ASK | {
        "tools": _TOOLS[:1], "tool_choice": "required", "parallel_tool_calls": False,
    }, 24),
    RouteRow("named", CHAT, "a named function", _PLAIN | {"tools": _TOOLS, "tool_choice": _NAMED}, 8),
    RouteRow("structured", CHAT, "a JSON schema, after the thinking", _ASK | {"response_format": _FORMAT}, 36),
    RouteRow("functions", CHAT, "legacy functions", _ASK | {"functions": [_WEATHER, _NOW]}, 27),
    RouteRow(
        "function", CHAT, "a named legacy function",
        _PLAIN | {"functions": [_WEATHER], "function_call": {"name": "weather"}}, 8,
    ),
    RouteRow("completion", COMPLETIONS, "text and log probabilities", _PROMPT | {"temperature": 0, "logprobs": 1}, 9),
    RouteRow(
        "prompts", COMPLETIONS, "two prompts, sampled with a seed",
        _PROMPT | {"prompt": ["hello", "the quick brown fox"], "temperature": 1, "seed": 3}, 20,
    ),
    RouteRow("message", MESSAGES, "text", _ASK | {"thinking": {"type": "disabled"}}, 9),
    RouteRow(
        "message-budget", MESSAGES, "thinking with a budget",
        _ASK | {"thinking": {"type": "enabled", "budget_tokens": BUDGET}}, BUDGET // 2,
    ),
    RouteRow("message-calls", MESSAGES, "calls that the model decides on", _ASK | {"tools": _MESSAGE_TOOLS}, 27),
    RouteRow("message-forced", MESSAGES, "a forced call", _ASK | {
        "tools": _MESSAGE_TOOLS, "tool_choice": {"type": "tool", "name": "weather"},
    }, 24),
    RouteRow("response", RESPONSES, "text", _RESPOND | {"chat_template_kwargs": {"enable_thinking": False}}, 9),
    RouteRow(
        "response-budget", RESPONSES, "thinking with a budget", _RESPOND | {"thinking_token_budget": BUDGET},
        BUDGET // 2,
    ),
    RouteRow("response-calls", RESPONSES, "calls that the model decides on", _RESPOND | {"tools": _RESPONSE_TOOLS}, 27),
    RouteRow("response-cut", RESPONSES, "a call cut by max_output_tokens", _RESPOND | {
        "tools": _RESPONSE_TOOLS, "max_output_tokens": CUT,
    }, 24),
    RouteRow("response-required", RESPONSES, "a required call", _RESPOND | {
        "tools": _RESPONSE_TOOLS[:1], "tool_choice": "required", "parallel_tool_calls": False,
    }, 24),
    RouteRow("response-structured", RESPONSES, "a JSON schema, after the thinking", _RESPOND | {
        "text": {"format": {"type": "json_schema", "name": "city", "schema": _CITY}},
    }, 36),
    RouteRow("background", RESPONSES, "calls, kept, in the background", _KEPT | {
        "background": True, "tools": _RESPONSE_TOOLS,
    }, 27),
    RouteRow("tokens", TOKENS, "token ids, text and log probabilities", {
        "token_ids": [30, 40, 50], "output_mode": "text",
        "sampling_params": {"max_tokens": 30, "temperature": 0, "ignore_eos": True, "logprobs": 1},
    }, 9),
    RouteRow("invocations", INVOCATIONS, "a chat with calls that the model decides on", _ASK | {"tools": _TOOLS}, 27),
    RouteRow("embeddings", "/v1/embeddings", "vectors of two texts", {"input": ["hello", "the quick brown fox"]}, None),
    RouteRow("cohere", "/v2/embed", "vectors as numbers and as bits", {
        "texts": ["hello", "the quick brown fox"], "embedding_types": ["float", "ubinary"],
    }, None),
    RouteRow("score", "/v1/score", "a text against two", {"text_1": "hello", "text_2": ["hello", "the fox"]}, None),
    RouteRow("other-score", "/score", "two pairs", {"data_1": ["a", "fox"], "data_2": ["hello", "the fox"]}, None),
    RouteRow("rerank", "/v2/rerank", "two documents", {"query": "hello", "documents": ["the fox", "hello"]}, None),
    *(
        RouteRow(name, route, "the best of two documents", {
            "query": "hello", "documents": ["the fox", {"text": "hello"}], "top_n": 1,
        }, None)
        for name, route in (("rerank-v1", "/v1/rerank"), ("rerank-bare", "/rerank"))
    ),
    RouteRow("pooling", "/pooling", "a vector for each token", {"input": "hello", "task": "token_embed"}, None),
    RouteRow("tokenize", "/tokenize", "a chat with tools", {
        "messages": _ASK["messages"], "tools": _TOOLS, "return_token_strs": True,
    }, None),
    RouteRow("detokenize", "/detokenize", "three tokens", {"tokens": [30, 40, 50]}, None),
    RouteRow("count-tokens", "/v1/messages/count_tokens", "a chat with tools", {
        "messages": _ASK["messages"], "tools": _MESSAGE_TOOLS,
    }, None),
    RouteRow("input-tokens", "/v1/responses/input_tokens", "items with tools", {
        "input": _KEPT["input"], "tools": _RESPONSE_TOOLS,
    }, None),
)  # fmt: skip
_PNG = "data:image/png;base64," + base64.b64encode(file_of(image_of(30, 20))).decode()
_JPEG = "data:image/jpeg;base64," + base64.b64encode(file_of(image_of(41, 40, seed=2), "JPEG")).decode()
_VALUES = array("f", ((37 * at % 101) / 50 - 1 for at in range(16 * 64))).tobytes()
_EMBEDS = {"data": base64.b64encode(_VALUES).decode(), "dtype": "float32", "shape": [16, 64]}
_SHORT = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
_TEXTS = [{"type": "text", "text": text} for text in ("the cat", "and the dog")]
IMAGE_ROWS = (
    RouteRow("image-chat", CHAT, "an image", _SHORT | {
        "return_token_ids": True,
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": _PNG}}, _TEXTS[0]]}],
    }, 5),
    RouteRow("images-choices", CHAT, "two images, two choices, sampled with a seed", _SHORT | {
        "temperature": 1, "seed": 5, "n": 2, "messages": [{"role": "user", "content": [
            _TEXTS[0], {"type": "image_url", "image_url": {"url": _PNG, "detail": "low"}},
            {"type": "image_url", "image_url": {"url": _JPEG}}, _TEXTS[1],
        ]}],
    }, 9),
    RouteRow("image-embeds", CHAT, "embeddings of an image, and an image", _SHORT | {
        "messages": [{"role": "user", "content": [
            {"type": "image_embeds", "image_embeds": _EMBEDS}, _TEXTS[0], {"type": "image_url", "image_url": _PNG},
        ]}],
    }, 5),
    RouteRow("image-completion", COMPLETIONS, "an image in a text", _SHORT | {
        "prompt": "the <image> here", "multi_modal_data": {"image": [_JPEG]}, "return_token_ids": True,
    }, 5),
    RouteRow("image-message", MESSAGES, "an image", {"temperature": 0, "max_tokens": 12, "messages": [
        {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": _PNG}}, _TEXTS[0]]},
    ]}, 5),
    RouteRow("image-response", RESPONSES, "an image", {
        "temperature": 0, "max_output_tokens": 12, "store": False, "input": [{"role": "user", "content": [
            {"type": "input_image", "image_url": _PNG}, {"type": "input_text", "text": "the cat"},
        ]}],
    }, 5),
)  # fmt: skip
"""Rows of a model that takes images."""
CLASSIFIER_ROWS = (
    RouteRow("classify", "/classify", "the classes of two prompts", {"input": [[3, 40, 5, 9], [7, 8]]}, None),
)
"""Rows of a model that classifies."""
GENERATE_ROWS = (
    RouteRow(
        "generate",
        GENERATE,
        "two texts, sampled with a seed",
        {
            "prompt": "the quick brown fox",
            "n": 2,
            "temperature": 1,
            "seed": 3,
            "max_tokens": 30,
            "ignore_eos": True,
        },
        20,
    ),
)
"""Rows of a scheduler with USE_OPENAI=0."""
ALL_ROWS = (*ROWS, *IMAGE_ROWS, *CLASSIFIER_ROWS, *GENERATE_ROWS)
