"""The bodies of the routes that generate text: their fields and limits.

Legacy and current names are both accepted: guided_* and structured_outputs, max_tokens and max_completion_tokens.
"""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from scheduler.api.body import Body, ManyIds, Priority, Salt, bounds, max_length
from scheduler.api.conversation import ConversationWithTools
from scheduler.api.field_schemas import (
    AnyFormat,
    AnyFunctionCall,
    AnyObject,
    AnyPrompt,
    AnySchema,
    AnyStop,
    AnyStopping,
    AnyToolChoice,
)

_MAX_BAD_WORD_CHARS = 256
_BadWord = Annotated[str, StringConstraints(min_length=1, max_length=_MAX_BAD_WORD_CHARS)]


class StreamOptions(Body):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_instances: bool | None = None


class RepetitionBody(Body):
    """`repetition_detection`."""

    max_pattern_size: Annotated[int, Field(ge=0)] = 0
    min_pattern_size: Annotated[int, Field(ge=0)] = 0
    min_count: Annotated[int, Field(ge=0)] = 0


class SamplingBody(Body):
    """The fields that control how a route that generates text samples tokens and where it stops."""

    model: str | None = None
    min_tokens: Annotated[int, bounds("min_tokens")] | None = None
    temperature: Annotated[float, bounds("temperature")] | None = None
    top_p: Annotated[float, bounds("top_p")] | None = None
    top_k: Annotated[int, bounds("top_k")] | None = None
    min_p: Annotated[float, bounds("min_p")] | None = None
    seed: Annotated[int, bounds("seed")] | None = None
    presence_penalty: Annotated[float, bounds("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, bounds("frequency_penalty")] | None = None
    repetition_penalty: Annotated[float, bounds("repetition_penalty")] | None = None
    logit_bias: dict[str, Annotated[float, Field(allow_inf_nan=False)]] | None = None
    allowed_token_ids: ManyIds | None = None
    bad_words: Annotated[list[_BadWord], max_length("bad_words")] | None = None
    stop: AnyStop = None
    stop_token_ids: Annotated[list[int], max_length("stop_token_ids")] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    repetition_detection: RepetitionBody | None = None
    thinking_token_budget: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    structured_outputs: AnyObject = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
    user: str | None = None
    request_id: str | None = None
    stream: bool | None = None


class GenerationBody(SamplingBody):
    """Fields common to the routes of completions and chats."""

    max_tokens: Annotated[int, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, bounds("n")] | None = None
    best_of: Annotated[int, bounds("best_of")] | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, bounds("length_penalty")] | None = None
    early_stopping: AnyStopping = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: Annotated[int, bounds("prompt_logprobs")] | None = None
    logprob_token_ids: Annotated[list[int], max_length("logprob_token_ids")] | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    response_format: AnyFormat = None
    guided_json: AnySchema = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None
    stream_options: StreamOptions | None = None

    @property
    def max_output(self) -> int | None:
        """The client's limit on output tokens; the newer name takes precedence."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def max_output_field(self) -> str:
        """The name of the field that set `max_output`."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def num_logprobs(self) -> int | None:
        """How many of the most likely tokens to return at each output position; None: no log probabilities."""
        return None

    @property
    def num_logprobs_field(self) -> str:
        """The name of the field that set `num_logprobs`."""
        return "logprobs"

    @property
    def stop_field(self) -> str:
        """The name of the field that set `stop`."""
        return "stop"

    @property
    def echoes(self) -> bool:
        """Whether the answer includes the prompt."""
        return False

    @property
    def counts_cached(self) -> bool:
        """Whether the answer has the number of cached prompt tokens, whatever --enable-prompt-tokens-details says."""
        return False


class CompletionBody(GenerationBody):
    """The body of /v1/completions."""

    prompt: AnyPrompt = None
    multi_modal_data: AnyObject = None
    echo: bool | None = None
    logprobs: Annotated[int, bounds("logprobs")] | None = None
    suffix: str | None = None

    @property
    def num_logprobs(self) -> int | None:
        """`logprobs`; 0 returns only those of the chosen tokens."""
        return self.logprobs

    @property
    def echoes(self) -> bool:
        """`echo`."""
        return bool(self.echo)


class ChatBody(ConversationWithTools, GenerationBody):
    """The body of /v1/chat/completions. `max_tokens` defaults to the rest of the context."""

    logprobs: bool | None = None
    top_logprobs: Annotated[int, bounds("logprobs")] | None = None
    echo: bool | None = None
    tool_choice: AnyToolChoice = None
    function_call: AnyFunctionCall = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None

    @property
    def num_logprobs(self) -> int | None:
        """`top_logprobs`, if `logprobs` is true."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def num_logprobs_field(self) -> str:
        """`top_logprobs`."""
        return "top_logprobs"
