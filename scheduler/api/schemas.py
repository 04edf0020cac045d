"""The fields of a request body and their limits. Unknown fields are ignored, null is the default, types are strict."""

from collections.abc import Mapping
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from wire.errors import InvalidRequest

Count = Annotated[int, Field(ge=1)]
_MAX_SHOWN_ERRORS = 10


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(strict=True, frozen=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(BaseModel):
    """What both surfaces share."""

    model_config = ConfigDict(strict=True, frozen=True)

    model: str
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Count | None = None
    best_of: Count | None = None
    stop: Any = None
    stop_token_ids: Annotated[list[int], Field(max_length=128)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Self:
        """Return the checked body. Raises InvalidRequest that names each wrong field, its value and its limit."""
        return _validated(cls, body)

    @property
    def max_output(self) -> int | None:
        """The limit of output tokens the client gave; the newer name wins."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionBody(GenerationBody):
    """The body of /v1/completions."""

    prompt: Any = None
    echo: bool | None = None


class ChatBody(GenerationBody):
    """The body of /v1/chat/completions."""

    messages: Any = None
    add_generation_prompt: bool | None = None


T = TypeVar("T", bound=BaseModel)


def _validated(cls: type[T], body: Mapping[str, Any]) -> T:
    try:
        return cls.model_validate(body)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)[:_MAX_SHOWN_ERRORS]
    raise InvalidRequest("; ".join(map(_told, found)), _path(found[0]))


def _path(entry: ErrorDetails) -> str:
    return ".".join(map(str, entry["loc"]))


def _told(entry: ErrorDetails) -> str:
    if entry["type"] == "missing":
        return f"{_path(entry)} is missing"
    value, message = entry["input"], entry["msg"]
    shown = repr(value)[:40] if isinstance(value, (int, float, str)) else f"a {type(value).__name__}"
    return f"{_path(entry)}: {message[:1].lower()}{message[1:]}, got {shown}"
