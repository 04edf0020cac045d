"""A conversation with images as a body of /v1/chat/completions, for workers of other engines. Pure."""

import json
import secrets
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from scheduler.images.image_part import LoadedImage, Message, images_in
from scheduler.templates.chat_options import ChatOptions
from wire.types import WorkerChat


def worker_chat(
    messages: Sequence[Message], options: ChatOptions, default_kwargs: Mapping[str, Any]
) -> WorkerChat | None:  # fmt: skip
    """Return the conversation and how to render it; None if it has embeddings, which workers take only pickled.

    An image is sent with its `detail`, but without its `uuid`, which would name it for clients with other keys too.
    """
    images: list[LoadedImage] = list(images_in(messages))
    if any(image.dtype for image in images):
        return None
    placeholder = secrets.token_hex(16)
    fields: dict[str, Any] = {
        "messages": [_message(one, placeholder) for one in _with_call_ids(messages)],
        "add_generation_prompt": options.add_generation_prompt,
        "continue_final_message": options.continue_final_message,
        "add_special_tokens": options.add_special_tokens,
    }
    if kwargs := {**default_kwargs, **options.template_kwargs}:
        fields["chat_template_kwargs"] = kwargs
    if options.template is not None:
        fields["chat_template"] = options.template
    if options.documents:
        fields["documents"] = options.documents
    if options.tools:  # for the template: the calls are read from the token ids here
        fields |= {"tools": options.tools, "tool_choice": "none"}
    between = orjson.dumps(fields)[1:-1].split(placeholder.encode())
    return WorkerChat(tuple(between), tuple((image.media_type, image.data) for image in images))


def _with_call_ids(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield the messages; calls and results without ids, which vLLM refuses, get ids, matched by their order.

    The ids have nine digits: templates of Mistral refuse others.
    """
    named, unnamed = set[str](), deque[str]()
    for at, message in enumerate(messages):
        if message["role"] == "tool":
            if unnamed and message.get("tool_call_id") not in named:
                yield {**message, "tool_call_id": unnamed.popleft()}
                continue
        elif calls := message.get("tool_calls", ()):
            made = [{"id": f"{at:05}{number:04}", **call} for number, call in enumerate(calls)]
            named = {call["id"] for call in calls if "id" in call}
            unnamed = deque(own["id"] for own, call in zip(made, calls, strict=True) if "id" not in call)
            yield {**message, "tool_calls": made}
            continue
        yield message


def _message(message: Message, placeholder: str) -> dict[str, Any]:
    """Return a message in the form of the API, where the arguments of calls are strings."""
    made, content = dict(message), message["content"]
    if isinstance(content, list):
        made["content"] = [_part(part, placeholder) for part in content] or None
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [call | {"function": _function(call["function"])} for call in calls]
    return made


def _part(part: Message, placeholder: str) -> Message:
    if "image" not in part:
        return part
    detail = part["image"].detail
    return {"type": "image_url", "image_url": {"url": placeholder} | ({"detail": detail} if detail else {})}


def _function(function: Mapping[str, Any]) -> dict[str, Any]:
    return {**function, "arguments": json.dumps(function["arguments"])}  # they may have integers beyond 64 bits
