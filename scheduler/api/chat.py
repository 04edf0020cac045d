"""POST /v1/chat/completions."""

import time
from typing import Any

from starlette.requests import Request

from scheduler.api.body import read_json
from scheduler.api.generation import Ended, Generation
from scheduler.api.generation_body import ChatBody
from scheduler.api.prompts import read_messages
from scheduler.api.refusals import refuse_chat_fields
from scheduler.api.request_ids import new_id
from scheduler.api.sampling import read_sampling, read_text_options
from scheduler.chat_options import ChatOptions
from scheduler.front import Front
from scheduler.pieces import Piece
from scheduler.request import GenerationRequest
from wire.errors import InvalidRequest


async def create_chat_completion(front: Front, request: Request) -> Generation:
    """Return the answer to one request, not yet run. Raises a PdserveError or HttpError for a bad one."""
    raw = await read_json(request, front.config.options)
    refuse_chat_fields(raw)
    body = ChatBody.read(raw)
    front.check_model(body.model)
    return await prepare(front, body)


async def prepare(front: Front, body: ChatBody) -> Generation:
    """Render, tokenise and check a body against the model."""
    options, tokens = front.config.options, front.tokens
    prompt = await tokens.encode_chat(
        read_messages(body.messages),
        ChatOptions(body.add_generation_prompt is not False, bool(body.add_special_tokens)),
    )
    if not prompt:
        raise InvalidRequest("the chat template made an empty prompt of the messages", "messages")
    most = front.most_output(len(prompt), body.n or 1)
    params = read_sampling(body, [prompt], tokens, options, default_max_tokens=most, param="messages")
    text = read_text_options(body, tokens, options, continues_prompt=False)
    request = GenerationRequest(
        new_id("chatcmpl"), (prompt,), params, options.first_token_timeout, options.stall_timeout
    )
    shape = ChatShape(request.request_id, body.model)
    return Generation(front, request, text, shape, bool(body.stream), body.include_usage)


class ChatShape:
    """chat.completion objects, and chat.completion.chunk ones while streaming."""

    def __init__(self, request_id: str, model: str) -> None:
        self._head = {
            "id": request_id, "object": "chat.completion.chunk", "created": int(time.time()), "model": model,
        }  # fmt: skip

    def opening(self, index: int) -> dict[str, Any]:
        """Return the chunk that names the speaker."""
        return self._chunk(index, {"role": "assistant", "content": ""})

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """Return a chunk of text."""
        delta = {"content": piece.text} if piece.text else {}
        if piece.finish_reason is None:
            return self._chunk(piece.index, delta)
        return self._chunk(piece.index, delta, piece.finish_reason, piece.stop_reason)

    def usage_chunk(self, usage: dict[str, int]) -> dict[str, Any]:
        """Return the last chunk."""
        return self._head | {"choices": [], "usage": usage}

    def whole(self, choices: list[Ended], usage: dict[str, int]) -> dict[str, Any]:
        """Return the whole answer."""
        return self._head | {"object": "chat.completion", "choices": [_choice(one) for one in choices], "usage": usage}

    def _chunk(
        self, index: int, delta: dict[str, str], finish: str | None = None, stop: str | int | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        if finish is not None:
            choice["stop_reason"] = stop
        return {**self._head, "choices": [choice]}


def _choice(one: Ended) -> dict[str, Any]:
    return {
        "index": one.index,
        "message": {"role": "assistant", "content": one.text},
        "logprobs": None,
        "finish_reason": one.finish_reason,
        "stop_reason": one.stop_reason,
    }
