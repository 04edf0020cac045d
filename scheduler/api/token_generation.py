"""POST /inference/v1/generate: token ids in, token ids out, in the format of vLLM's route of this name.

{"token_ids": [72, 101], "sampling_params": {"max_tokens": 2}}   ->   {"choices": [{"token_ids": [108, 111], …}], …}
"""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from starlette.requests import Request

from scheduler.api.body import Body, ManyIds, Priority, Salt, bounds
from scheduler.api.generation import Generation
from scheduler.api.generation_body import GenerationBody, StreamOptions
from scheduler.api.prepared_request import PreparedRequest, prepare_generation
from scheduler.api.prompt_scores import FIELD, read_lists
from scheduler.api.prompts import check_token_ids
from scheduler.api.read_body import read_body
from scheduler.api.refusals import SAMPLING_NOT_SERVED, TOKENS_NOT_SERVED, Refusal, refuse_fields
from scheduler.api.request_ids import new_id, shown_id
from scheduler.api.tokens_shape import TokensShape
from scheduler.app_context import AppContext
from wire.errors import InvalidRequest, PromptTooLong

_OWN_FIELDS = ("stream", "stream_options", "cache_salt", "priority", "request_id")


class TokensSamplingBody(GenerationBody):
    """`sampling_params`: those of /v1/completions, and the tokens to score at positions of the prompt."""

    not_served: ClassVar[Mapping[str, Refusal]] = SAMPLING_NOT_SERVED

    logprobs: Annotated[int, bounds("logprobs")] | None = None
    detokenize: bool | None = None
    prompt_logprob_token_ids: Annotated[list[ManyIds], Field(fail_fast=True)] | None = None
    prompt_logprob_start: Annotated[int, Field(ge=0)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        """`logprobs`."""
        return self.logprobs

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, given: Any) -> Any:
        if isinstance(given, Mapping):
            with _within_sampling():
                refuse_fields(given, cls.not_served)
        return given


class TokensBody(Body):
    """The body of /inference/v1/generate. `max_tokens` defaults to the rest of the context."""

    not_served: ClassVar[Mapping[str, Refusal]] = TOKENS_NOT_SERVED

    token_ids: Annotated[ManyIds, Field(min_length=1)]
    sampling_params: TokensSamplingBody
    model: str | None = None
    output_mode: Literal["tokens", "text"] = "tokens"
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Salt | None = None
    priority: Priority | None = None
    request_id: str | None = None


async def generate_tokens(context: AppContext, request: Request) -> Generation:
    """Return the response that will run one request. Raises a PdserveError or HttpError if the request is invalid."""
    body = await read_body(context, request, TokensBody)
    model = context.model_named(body.model)
    if body.sampling_params.detokenize is False:
        if body.output_mode == "text":
            raise InvalidRequest("output_mode text needs sampling_params.detokenize to be true", "output_mode")
        if body.sampling_params.stop:
            raise InvalidRequest("stop strings need sampling_params.detokenize to be true", "sampling_params.stop")
    prepared = await _prepare(context, body, request)
    own_id = new_id("generate-tokens")
    shape = TokensShape(
        shown_id(own_id, request, body.request_id), model, prepared.formatter, prepared.options,
        has_text=body.output_mode == "text", has_prompt=bool(body.return_token_ids),
        scored=body.sampling_params.prompt_logprob_token_ids,
    )  # fmt: skip
    return prepared.generation(own_id, shape)


async def _prepare(context: AppContext, body: TokensBody, request: Request) -> PreparedRequest:
    tokens, ids = context.tokens, tuple(body.token_ids)
    if len(ids) > tokens.max_model_len:
        raise PromptTooLong(
            f"This model's maximum context length is {tokens.max_model_len} tokens; token_ids has {len(ids)}",
            "token_ids",
        )
    check_token_ids(ids, tokens, "token_ids")
    own = {name: getattr(body, name) for name in _OWN_FIELDS}
    sampling = body.sampling_params.model_copy(update=own | {"return_token_ids": True})
    with _within_sampling():
        prepared = await prepare_generation(
            context, sampling, request, [tokens.shared_ids.of(ids)],
            default_max_tokens=None, param="token_ids", continues_prompt=True,
        )  # fmt: skip
        return _with_scores(prepared, sampling)


def _with_scores(prepared: PreparedRequest, sampling: TokensSamplingBody) -> PreparedRequest:
    """Return the request with the log probabilities of the given tokens. Raises InvalidRequest."""
    given, start, context = sampling.prompt_logprob_token_ids, sampling.prompt_logprob_start or 0, prepared.context
    if given is None:
        if start:
            raise InvalidRequest(f"prompt_logprob_start needs {FIELD}", "prompt_logprob_start")
        return prepared
    if sampling.stream:
        raise InvalidRequest(f"{FIELD} cannot be streamed: leave stream out", FIELD)
    if sampling.prompt_logprobs:
        raise InvalidRequest(
            f"prompt_logprobs must be 0 or null with {FIELD}, which replace the likeliest tokens", "prompt_logprobs"
        )
    lists = read_lists(given, start, len(prepared.prompts[0]), context.tokens, context.config.options.max_logprobs)
    params = dataclasses.replace(prepared.params, prompt_logprobs=0, prompt_logprob_token_ids=lists)
    return dataclasses.replace(prepared, params=params)


@contextmanager
def _within_sampling() -> Iterator[None]:
    """Name the fields of `sampling_params` by their whole path in errors."""
    try:
        yield
    except InvalidRequest as error:
        if error.param is not None and error.param.partition(".")[0] not in TokensBody.model_fields:
            error.param = f"sampling_params.{error.param}"
        raise
