"""The bodies of the two surfaces that generate text: their fields and limits."""

from typing import Annotated, Any

from pydantic import Field

from scheduler.api.schemas import Body, Count


class StreamOptions(Body):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(Body):
    """What both surfaces share."""

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
