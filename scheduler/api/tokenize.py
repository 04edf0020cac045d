"""POST /tokenize and /detokenize, GET /tokenizer_info: the model's tokenizer over HTTP."""

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from scheduler.api.body import Body, ManyIds
from scheduler.api.chat import chat_options
from scheduler.api.conversation import ConversationWithTools
from scheduler.api.errors import json_response
from scheduler.api.field_schemas import AnyObject
from scheduler.api.images import image_prompt, load_images
from scheduler.api.messages import read_messages
from scheduler.api.prompts import check_token_ids
from scheduler.api.read_body import read_body
from scheduler.app_context import AppContext
from scheduler.tools.definitions import read_tools
from wire.errors import InvalidRequest

_MAX_INLINE = 2000  # ids: below this a thread costs more than the work
_MAX_IDS = 2**20


class TokenizeBody(ConversationWithTools):
    """The body of /tokenize: `prompt`, or `messages` in the model's chat template."""

    model: str | None = None
    prompt: str | None = None
    multi_modal_data: AnyObject = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Annotated[ManyIds, Field(max_length=_MAX_IDS)]


async def tokenize(context: AppContext, request: Request) -> Response:
    """Return the ids of a text or a conversation. Raises a PdserveError or HttpError if the request is invalid."""
    body = await read_body(context, request, TokenizeBody)
    context.model_named(body.model)
    ids = await _encode(context, body, request)
    answer = {
        "count": len(ids),
        "max_model_len": context.tokens.max_model_len,
        "tokens": ids,
        "token_strs": context.tokens.spellings(ids) if body.return_token_strs else None,
    }
    return json_response(answer)


async def detokenize(context: AppContext, request: Request) -> Response:
    """Return the text of ids, including special tokens."""
    body = await read_body(context, request, DetokenizeBody)
    context.model_named(body.model)
    if body.tokens:
        check_token_ids(tuple(body.tokens), context.tokens, "tokens")
    if len(body.tokens) > _MAX_INLINE:
        text = await asyncio.to_thread(context.tokens.decode, body.tokens, skip_special_tokens=False)
    else:
        text = context.tokens.decode(body.tokens, skip_special_tokens=False)
    return json_response({"prompt": text})


async def tokenizer_info(context: AppContext, _: Request) -> Response:
    """Return the model's tokenizer_config.json, the special tokens as text and the chat template in use."""
    files = context.tokens.files
    own = await asyncio.to_thread(_read_config, files.folder / "tokenizer_config.json")
    used: dict[str, Any] = {"chat_template": files.chat_template, "vocab_size": context.tokens.vocab_size}
    return json_response({**own, **files.special_tokens, **used})


async def _encode(context: AppContext, body: TokenizeBody, request: Request) -> tuple[int, ...]:
    if (body.prompt is None) is (body.messages is None):
        raise InvalidRequest("specify either prompt or messages", "prompt")
    add_special = body.add_special_tokens is not False
    if body.multi_modal_data is not None:
        data = body.multi_modal_data
        return (await image_prompt(context, request, body.prompt, data, add_special_tokens=add_special)).token_ids
    if body.prompt is not None:
        return await context.tokens.encode(body.prompt, add_special_tokens=add_special)
    options = chat_options(body, read_tools(body.tools, body.functions))
    messages = await load_images(context, request, read_messages(body.messages), counts=True)
    return await context.tokens.encode_chat(messages, options)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    own: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return own
