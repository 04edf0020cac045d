"""The common part of all routes that generate text: from token ids and a checked body to a request ready to run."""

import dataclasses
import hashlib
from collections.abc import Sequence

from starlette.requests import Request

from scheduler.api.answer_limit import check_answer
from scheduler.api.answer_options import AnswerOptions, read_answer_options
from scheduler.api.answer_shape import AnswerShape
from scheduler.api.generation import Generation
from scheduler.api.generation_body import GenerationBody
from scheduler.api.logprobs import TokenFormatter
from scheduler.api.reasoning import ChatStart, read_thinking
from scheduler.api.sampling import read_sampling
from scheduler.api.structured import Constraint, read_structured
from scheduler.api.text_options import read_text_options
from scheduler.app_context import AppContext
from scheduler.http.header import header_of
from scheduler.observability.traces import traceparent_of
from scheduler.reasoning.options import ReasoningOptions
from scheduler.request import GenerationRequest
from scheduler.request_class import UNCLASSED, RequestClass
from scheduler.text.pieces import TextOptions
from scheduler.tokenizer.truncation import truncate_prompt
from scheduler.tools.call_options import CallOptions
from wire.cheap_dataclass import cheap_dataclass
from wire.errors import InvalidRequest
from wire.types import PromptImage, SamplingParams, WorkerChat

_PRIORITY_HEADER = b"x-vllm-priority"


@cheap_dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A checked request whose answer has no format yet. `prompts` are the ids to compute, truncated if requested."""

    context: AppContext
    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams
    text: TextOptions
    options: AnswerOptions
    formatter: TokenFormatter
    tenant: str
    request_class: RequestClass
    cache_salt: str
    priority: int
    traceparent: str
    images: tuple[PromptImage, ...] = ()
    worker_chat: WorkerChat | None = None

    def generation(
        self, request_id: str, shape: AnswerShape, *, echo: tuple[str, ...] = (), seeds: tuple[int, ...] = (),
        calls: CallOptions | None = None, reasoning: ReasoningOptions | None = None,
    ) -> Generation:  # fmt: skip
        """Return the response in the format of `shape`; `echo` has the text before each prompt's choices.

        `calls` says how the output becomes tool calls, `reasoning` how the thinking is separated from it.
        """
        options = self.context.config.options
        request = GenerationRequest(
            request_id, self.prompts, self.params, options.first_token_timeout, options.stall_timeout, seeds=seeds,
            cache_salt=self.cache_salt, tenant=self.tenant, priority=self.priority,
            traceparent=self.traceparent, images=(self.images,) if self.images else (), chat=self.worker_chat,
            request_class=self.request_class,
        )  # fmt: skip
        text = self.text
        if echo or calls is not None or reasoning is not None:
            text = dataclasses.replace(text, echo=echo, calls=calls, reasoning=reasoning)
        return Generation(self.context, request, text, shape, self.options)


async def prepare_generation(
    context: AppContext, body: GenerationBody, request: Request, prompts: Sequence[tuple[int, ...]], *,
    default_max_tokens: int | None, param: str, continues_prompt: bool,
    forced: Constraint | None = None, chat: ChatStart | None = None, images: tuple[PromptImage, ...] = (),
    worker_chat: WorkerChat | None = None,
) -> PreparedRequest:  # fmt: skip
    """Check everything that needs the model, the prompts or the config. Raises InvalidRequest.

    `forced` is the constraint of an answer that must consist of calls. `chat`: how the prompt of a chat ends.
    `images` are those of the only prompt, `worker_chat` is that prompt for workers of other engines.
    """
    room = max(1, context.tokens.max_model_len - (body.max_output or 1))
    keep, side = body.truncate_prompt_tokens, body.truncation_side or "left"
    cut = tuple(truncate_prompt(ids, keep, room=room, side=side) for ids in prompts)
    if (images or worker_chat) and cut[0] != prompts[0]:
        raise InvalidRequest(
            f"truncate_prompt_tokens would cut the prompt's {len(prompts[0])} tokens, but a prompt with images "
            "cannot be truncated",
            "truncate_prompt_tokens",
        )
    text = read_text_options(body, context.tokens, context.config.options, continues_prompt=continues_prompt)
    constraint = read_structured(body, forced)
    request.scope["state"]["structured_by"] = constraint and constraint[0]
    params = await read_sampling(context, body, cut, constraint, default_max_tokens=default_max_tokens, param=param)
    thinking = read_thinking(context, chat, cut, params, body.thinking_token_budget)
    params = params if thinking is None else dataclasses.replace(params, thinking=thinking)
    options = read_answer_options(body, context.config.options)
    check_answer(body, params, cut, options, context.config.options, num_echoes=options.n if continues_prompt else 1)
    tenant = str(request.scope["state"].get("tenant", ""))
    return PreparedRequest(
        context, cut, params, text, options,
        TokenFormatter(
            context.tokens.texts, options.logprobs or 0, options.tokens_by_number, ranked=options.token_ids,
            listed=bool(params.logprob_token_ids),
        ),
        tenant, class_of(request), cache_salt_of(context, tenant, body.cache_salt), priority_of(body.priority, request),
        traceparent_of(context.traces, request.scope["headers"]), images, worker_chat,
    )  # fmt: skip


def class_of(request: Request) -> RequestClass:
    """Return the class that the route has found for the request (app.py)."""
    found: RequestClass = request.scope["state"].get("request_class", UNCLASSED)
    return found


def cache_salt_of(context: AppContext, tenant: str, salt: str | None) -> str:
    """Return the salt that limits KV sharing: to the client's key and, if given, to requests with the same salt."""
    parts = (tenant, salt or "", context.salt_of_all.value)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest() if any(parts) else ""


def priority_of(in_body: int | None, request: Request) -> int:
    """Return the priority from the body, else from the header, else 0. Lower values run earlier."""
    in_header = header_of(request.scope, _PRIORITY_HEADER)
    if in_body is not None or in_header is None:
        return in_body or 0
    try:
        priority = int(in_header)
    except ValueError:
        raise InvalidRequest(f"X-Vllm-Priority {in_header[:40]!r} is not a whole number", "priority") from None
    if not -(2**31) <= priority < 2**31:
        raise InvalidRequest(f"X-Vllm-Priority {in_header[:40]} is out of range: -2^31 to 2^31 - 1", "priority")
    return priority
