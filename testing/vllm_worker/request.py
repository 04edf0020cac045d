"""The body of a completion as vLLM reads it, for prompts of token ids, and that of a chat."""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from testing.engine.fake_model import FakeConfig
from testing.vllm_worker.bad_request import BadRequest
from testing.vllm_worker.conversation import render_chat
from wire.types import SamplingParams

Leg = Literal["prefill", "decode", "local"]

_NEEDED = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
_MAX_LOGPROBS = 20
_COPIED = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "n", "min_tokens")


@dataclass(frozen=True, slots=True)
class FakeBody:
    """A validated body. `params` are those of the model; `transfer` is `kv_transfer_params`, forwarded unread.

    A chat's body has one prompt; `marks` are the marks of the chat's images, by position.
    """

    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams
    stream: bool
    include_usage: bool
    return_token_ids: bool
    transfer: dict[str, Any]
    cache_salt: str = ""
    is_chat: bool = False
    marks: Mapping[int, int] = field(default_factory=dict)
    late_error: BadRequest | None = None

    @property
    def leg(self) -> Leg:
        """Which leg of a hand-off it is."""
        if self.transfer.get("do_remote_prefill"):
            return "decode"
        return "prefill" if self.transfer.get("do_remote_decode") else "local"

    def names_engine(self, *more: str) -> bool:
        """Return whether the reference names the engine of the KV, and has the fields `more`."""
        return all(self.transfer.get(name) for name in (*_NEEDED, *more))


def read_body(body: Mapping[str, Any], model: str, fake: FakeConfig, *, is_chat: bool = False) -> FakeBody:
    """Return the body of a request for `model`. Raises BadRequest."""
    if (body.get("model") or model) != model:
        message = f"The model `{body['model']}` does not exist. Valid aliases: {model}."
        raise BadRequest(message, status=404, kind="NotFoundError", param="model")
    stream = bool(body.get("stream"))
    if body.get("stream_options") and not stream:
        raise BadRequest("Stream options can only be defined when `stream=True`.", param="stream_options")
    chat = render_chat(body, takes_images=fake.takes_images) if is_chat else None
    prompts, max_tokens = _prompts(body.get("prompt")) if chat is None else (chat.token_ids,), body.get("max_tokens")
    room = fake.max_model_len - max(map(len, prompts))
    params = _params(
        body,
        _max_tokens((room if is_chat else 16) if max_tokens is None else max_tokens, room, fake.max_model_len),
        fake,
    )
    if params.n > 1 and params.temperature == 0:
        raise BadRequest(f"n must be 1 when using greedy sampling, got {params.n}.")
    if params.min_tokens > params.max_tokens:
        text = f"min_tokens must be less than or equal to max_tokens={params.max_tokens}, got {params.min_tokens}."
        raise BadRequest(text)
    return FakeBody(
        prompts,
        params,
        stream,
        include_usage=bool((body.get("stream_options") or {}).get("include_usage")),
        return_token_ids=bool(body.get("return_token_ids")),
        transfer=dict(body.get("kv_transfer_params") or {}),
        cache_salt=body.get("cache_salt") or "",
        is_chat=is_chat,
        marks={} if chat is None else chat.marks,
        late_error=_late_error(body, params),
    )


def _late_error(body: Mapping[str, Any], params: SamplingParams) -> BadRequest | None:
    """Return the error that only vLLM's engine finds (SamplingParams.verify), after a stream has begun."""
    if body.get("thinking_token_budget", -1) not in (None, -1):
        return BadRequest("thinking_token_budget needs --reasoning-parser, which this worker lacks.")
    if (params.logprobs or 0) > _MAX_LOGPROBS:
        return BadRequest(f"Requested sample logprobs of {params.logprobs}, which is greater than max: {_MAX_LOGPROBS}")
    try:
        re.compile((body.get("structured_outputs") or {}).get("regex", ""))
    except re.error as error:
        return BadRequest(f"Failed to transform regex into a grammar: {error}")
    return None


def _prompts(value: Any) -> tuple[tuple[int, ...], ...]:
    rows = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
    if not all(isinstance(row, list) and row and all(isinstance(one, int) for one in row) for row in rows):
        raise BadRequest("this worker reads prompts of token ids only", param="prompt")
    return tuple(map(tuple, rows))


def _params(body: Mapping[str, Any], max_tokens: int, fake: FakeConfig) -> SamplingParams:
    given = {name: body[name] for name in _COPIED if body.get(name) is not None}
    seed = body.get("seed")
    stops = (*(body.get("stop_token_ids") or ()), *(() if body.get("ignore_eos") else fake.eos_token_ids))
    return SamplingParams(
        max_tokens,
        temperature=1.0 if body.get("temperature") is None else body["temperature"],
        seed=secrets.randbits(63) if seed is None else seed % 2**64,
        stop_token_ids=stops,
        allowed_token_ids=tuple(body.get("allowed_token_ids") or ()),
        logprobs=_num_logprobs(body),
        prompt_logprobs=body.get("prompt_logprobs"),
        **given,
    )


def _num_logprobs(body: Mapping[str, Any]) -> int | None:
    """Return how many log probabilities each output token has; chats count them in a field of their own."""
    given: int | None = body.get("logprobs")
    return given if "messages" not in body else int(body.get("top_logprobs") or 0) if given else None


def _max_tokens(max_tokens: int, room: int, limit: int) -> int:
    """Return how many tokens may be generated: vLLM lowers the limit to the room that the prompt leaves."""
    if room < 0:
        raise BadRequest(
            f"This model's maximum context length is {limit} tokens. However, your prompt contains {limit - room} "
            "input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the "
            f"input prompt. (parameter=input_tokens, value={limit - room})",
            param="input_tokens",
        )
    if max_tokens > limit:
        text = (
            f"max_tokens={max_tokens} cannot be greater than max_model_len={limit}. Please request fewer output tokens."
        )
        raise BadRequest(f"{text} (parameter=max_tokens, value={max_tokens})", param="max_tokens")
    if min(max_tokens, room) < 1:
        raise BadRequest(f"max_tokens must be at least 1, got {min(max_tokens, room)}.", param="max_tokens")
    return min(max_tokens, room)
