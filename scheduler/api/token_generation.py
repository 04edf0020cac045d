"""POST /inference/v1/generate: token ids in, token ids out, in the format of vLLM's route of this name.

{"token_ids": [72, 101], "sampling_params": {"max_tokens": 2}}   ->   {"choices": [{"token_ids": [108, 111], …}], …}
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from starlette.requests import Request

from scheduler.api.body import Body, ManyIds, Priority, Salt, bounds
from scheduler.api.generation import Generation
from scheduler.api.generation_body import GenerationBody, StreamOptions
from scheduler.api.prepared_request import PreparedRequest, prepare_generation
from scheduler.api.prompts import check_token_ids
from scheduler.api.read_body import read_body
from scheduler.api.refusals import SAMPLING_NOT_SERVED, TOKENS_NOT_SERVED, Refusal, refuse_fields
from scheduler.api.request_ids import new_id, shown_id
from scheduler.api.tokens_shape import TokensShape
from scheduler.app_context import AppContext
from wire.errors import InvalidRequest, PromptTooLong

_OWN_FIELDS = ("stream", "stream_options", "cache_salt", "priority", "request_id")


class TokensSamplingBody(GenerationBody):
    """`sampling_params`: the sampling parameters of /v1/completions."""

    not_served: ClassVar[Mapping[str, Refusal]] = SAMPLING_NOT_SERVED

    logprobs: Annotated[int, bounds("logprobs")] | None = None
    detokenize: bool | None = None

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
    """Return the response to one request, not yet run. Raises a PdserveError or HttpError for an invalid one."""
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
        return await prepare_generation(
            context, sampling, request, [tokens.shared_ids.of(ids)],
            default_max_tokens=None, param="token_ids", continues_prompt=True,
        )  # fmt: skip


@contextmanager
def _within_sampling() -> Iterator[None]:
    """Name the fields of `sampling_params` by their whole path in errors."""
    try:
        yield
    except InvalidRequest as error:
        if error.param is not None and error.param.partition(".")[0] not in TokensBody.model_fields:
            error.param = f"sampling_params.{error.param}"
        raise
