"""A small valid body for each route: the examples in the OpenAPI document."""

from typing import Any

_CHAT = {"messages": [{"role": "user", "content": "hello"}]}
_PROMPT = {"prompt": "hello", "max_tokens": 4}
_QUERY = {"query": "hello", "documents": ["good morning", "hello"]}
_PAIR = {"text_1": "hello", "text_2": "good morning"}

EXAMPLE_BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": _PROMPT,
    "/v1/chat/completions": _CHAT | {"max_tokens": 4},
    "/v1/responses": {"input": "hello", "max_output_tokens": 4},
    "/v1/responses/input_tokens": {"input": "hello"},
    "/v1/messages": _CHAT | {"max_tokens": 4},
    "/v1/messages/count_tokens": _CHAT,
    "/inference/v1/generate": {"token_ids": [7, 9], "sampling_params": {"max_tokens": 4}},
    "/v1/embeddings": {"input": "hello"},
    "/v2/embed": {"texts": ["hello"]},
    "/v1/score": _PAIR,
    "/score": _PAIR,
    "/rerank": _QUERY,
    "/v1/rerank": _QUERY,
    "/v2/rerank": _QUERY,
    "/classify": {"input": "hello"},
    "/pooling": {"input": "hello"},
    "/invocations": _PROMPT,
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [7, 9]},
    "/generate": _PROMPT,
}
