"""POST /v1/completions."""

import time
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from scheduler.api.body import read_json
from scheduler.api.generation import Ended, Generation
from scheduler.api.generation_body import CompletionBody
from scheduler.api.prompts import encode_prompt, read_prompts
from scheduler.api.refusals import refuse_completion_fields
from scheduler.api.request_ids import new_id
from scheduler.api.sampling import draw_seed, read_sampling, read_text_options
from scheduler.front import Front
from scheduler.pieces import Piece
from scheduler.request import GenerationRequest

DEFAULT_MAX_TOKENS = 16


async def create_completion(front: Front, request: Request) -> Generation:
    """Return the answer to one request, not yet run. Raises a PdserveError or HttpError for a bad one."""
    raw = await read_json(request, front.config.options)
    refuse_completion_fields(raw)
    body = CompletionBody.read(raw)
    front.check_model(body.model)
    return await prepare(front, body)


async def prepare(front: Front, body: CompletionBody) -> Generation:
    """Tokenise and check a body against the model."""
    options, tokens = front.config.options, front.tokens
    given = read_prompts(body.prompt, max_prompts=options.max_prompts, max_model_len=tokens.max_model_len)
    add_special = body.add_special_tokens is not False
    prompts = [await encode_prompt(prompt, tokens, add_special_tokens=add_special) for prompt in given]
    params = read_sampling(body, prompts, tokens, options, default_max_tokens=DEFAULT_MAX_TOKENS, param="prompt")
    text = read_text_options(body, tokens, options, continues_prompt=True)
    seeds = () if body.seed is not None else tuple(draw_seed() for _ in prompts)  # else equal prompts answer alike
    request = GenerationRequest(
        new_id("cmpl"), tuple(prompts), params, options.first_token_timeout, options.stall_timeout, seeds=seeds
    )
    echoed: dict[int, str] = {}
    if body.echo:
        texts = [prompt if isinstance(prompt, str) else tokens.decode(prompt) for prompt in given]
        echoed = {at * params.n + sequence: text for at, text in enumerate(texts) for sequence in range(params.n)}
    shape = CompletionShape(request.request_id, body.model, echoed)
    return Generation(front, request, text, shape, bool(body.stream), body.include_usage)


class CompletionShape:
    """text_completion objects, whole and in chunks of the same kind."""

    def __init__(self, request_id: str, model: str, echoed: Mapping[int, str]) -> None:
        self._head = {"id": request_id, "object": "text_completion", "created": int(time.time()), "model": model}
        self._echoed = dict(echoed)

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the prompt where it is echoed, else None."""
        return self._chunk(index, self._echoed[index], None, None) if index in self._echoed else None

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """Return a chunk of text."""
        return self._chunk(piece.index, piece.text, piece.finish_reason, piece.stop_reason)

    def usage_chunk(self, usage: dict[str, int]) -> dict[str, Any]:
        """Return the last chunk."""
        return self._head | {"choices": [], "usage": usage}

    def whole(self, choices: list[Ended], usage: dict[str, int]) -> dict[str, Any]:
        """Return the whole answer."""
        told = [
            _choice(one.index, self._echoed.get(one.index, "") + one.text, one.finish_reason, one.stop_reason)
            for one in choices
        ]
        return self._head | {"choices": told, "usage": usage}

    def _chunk(self, index: int, text: str, finish: str | None, stop: str | int | None) -> dict[str, Any]:
        return {**self._head, "choices": [_choice(index, text, finish, stop)]}


def _choice(index: int, text: str, finish: str | None, stop: str | int | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": stop}
