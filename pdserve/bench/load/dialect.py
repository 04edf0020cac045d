"""Build the request body of each route, and parse its response."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from pdserve.bench.load.load_request import LoadRequest
from wire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One parsed event; `is_output`: it carries output; `usage`: prompt and completion tokens."""

    text: str = ""
    is_output: bool = False
    finish: str | None = None
    usage: tuple[int, int] | None = None
    error: str | None = None


class ApiDialect(Protocol):
    """The request and response format of one route."""

    @property
    def path(self) -> str:
        """The path of the route."""
        ...

    @property
    def is_streamed(self) -> bool:
        """Whether the response is streamed."""
        ...

    def body(self, request: LoadRequest) -> dict[str, Any]:
        """Return the request body."""
        ...


@dataclass(frozen=True, slots=True)
class Completions:
    """/v1/completions; `fields` are added to every request and take precedence."""

    model: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    path: str = "/v1/completions"
    is_streamed: bool = field(default=True, init=False)

    def body(self, request: LoadRequest) -> dict[str, Any]:
        """Return a body with the prompt as text or as token ids."""
        fields = {"model": self.model, "prompt": request.prompt, "max_tokens": request.max_tokens}
        return fields | _stream_fields() | dict(self.fields)


@dataclass(frozen=True, slots=True)
class Chat:
    """/v1/chat/completions; `fields` are added to every request and take precedence."""

    model: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    path: str = "/v1/chat/completions"
    is_streamed: bool = field(default=True, init=False)

    def body(self, request: LoadRequest) -> dict[str, Any]:
        """Return a body with the prompt as the user's message. Raises ConfigError for token ids."""
        if not isinstance(request.prompt, str):
            raise ConfigError("a chat needs text: use --backend openai for token ids")
        messages = [{"role": "user", "content": request.prompt}]
        fields = {"model": self.model, "messages": messages, "max_completion_tokens": request.max_tokens}
        return fields | _stream_fields() | dict(self.fields)


@dataclass(frozen=True, slots=True)
class Embeddings:
    """/v1/embeddings, not streamed; `fields` are added to every request and take precedence."""

    model: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    path: str = "/v1/embeddings"
    is_streamed: bool = field(default=False, init=False)

    def body(self, request: LoadRequest) -> dict[str, Any]:
        """Return a body with the prompt as text or as token ids."""
        return {"model": self.model, "input": request.prompt} | dict(self.fields)


def _stream_fields() -> dict[str, Any]:
    return {"temperature": 0.0, "stream": True, "stream_options": {"include_usage": True}}


def read_piece(event: Any) -> StreamEvent:
    """Parse an event of either text route. Raises ValueError for an invalid one."""
    if not isinstance(event, dict):
        raise ValueError(f"an event is not an object: {str(event)[:80]}")
    if event.get("error"):
        return StreamEvent(error=error_message(event))
    with _of_known_form(event):
        usage = _usage(event)
        choices = event.get("choices")
        if not choices:
            return StreamEvent(usage=usage)
        text, others = _choice_output(choices[0])
        return StreamEvent(text, bool(text) or others, choices[0].get("finish_reason"), usage)


def read_whole(answer: Any) -> StreamEvent:
    """Parse a response that is not streamed: its prompt tokens. Raises ValueError for an invalid one."""
    if not isinstance(answer, dict) or "data" not in answer:
        raise ValueError(f"the response is not a list of vectors: {str(answer)[:80]}")
    with _of_known_form(answer):
        return StreamEvent(finish="stop", usage=_usage(answer))


@contextlib.contextmanager
def _of_known_form(event: Any) -> Iterator[None]:
    try:
        yield
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"a part of the response has an unexpected form: {str(event)[:80]}") from error


def _usage(answer: Mapping[str, Any]) -> tuple[int, int] | None:
    used = answer.get("usage")
    if not isinstance(used, dict):
        return None
    return int(used.get("prompt_tokens") or 0), int(used.get("completion_tokens") or 0)


def error_message(answer: Any) -> str:
    """Return the message of an error body, in OpenAI's form or another."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return " ".join(str(error).split())[:300]


def _choice_output(choice: Mapping[str, Any]) -> tuple[str, bool]:
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return "" + (choice.get("text") or ""), bool(choice.get("token_ids"))
    thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
    return thought + (delta.get("content") or ""), bool(delta.get("tool_calls") or choice.get("token_ids"))
