"""Read `system` and `messages` of Anthropic's API into the form that chat templates expect. Pure."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from scheduler.images.image_part import image_part
from wire.errors import InvalidRequest

Message = dict[str, Any]
_Block = Mapping[str, Any]
_MEDIA = frozenset(("document", "search_result"))
_MEDIA_TYPE = re.compile(r"image/[a-z0-9.+-]{1,40}")
_BILLING = "x-anthropic-billing-header"
"""Begins the system prompt of Claude Code; left out, because its hash of the request would defeat the prefix cache."""


def read_conversation(messages: Any, system: Any) -> list[Message]:
    """Return the conversation for a template. Raises InvalidRequest with the path of the field."""
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a list of at least one message", "messages")
    read: list[Message] = []
    calls = frozenset[str]()  # of the last assistant message
    for at, message in enumerate(messages):
        path = f"messages.{at}"
        if not isinstance(message, dict):
            raise InvalidRequest(f"{path} is not an object", path)
        content, role = f"{path}.content", message.get("role")
        match role:
            case "user":
                read += _user(message.get("content"), content, calls)
            case "assistant" if at + 1 == len(messages) and message.get("content") in ("", []):
                pass  # this API allows it, as the beginning of an answer
            case "assistant":
                read.append(_assistant(message.get("content"), content))
                calls = frozenset(call["id"] for call in read[-1].get("tool_calls", ()))
            case "system":
                read += _system(message.get("content"), content)
            case _:
                raise InvalidRequest(f"{path}.role must be user, assistant or system", f"{path}.role")
    if not read:
        raise InvalidRequest("messages has no message with content", "messages")
    return ([] if system is None or system == [] else _system(system, "system")) + read


def continues_answer(messages: Sequence[Message]) -> bool:
    """Return whether the last message is the beginning of the answer."""
    last = messages[-1]
    return last["role"] == "assistant" and "tool_calls" not in last and bool(last["content"])


def _system(content: Any, path: str) -> list[Message]:
    texts = [_text(block, at, "system") for at, block in _blocks(content, path)]
    text = "".join(one for one in texts if not one.startswith(_BILLING))
    return [{"role": "system", "content": text}] if text else []


def _user(content: Any, path: str, calls: frozenset[str]) -> list[Message]:
    """Return a message for each call result, and a message with the texts and images."""
    results: list[Message] = []
    parts: list[str | Message] = []
    blocks = _blocks(content, path)
    for at, block in blocks:
        match block["type"]:
            case "tool_result":
                results.append(_result(block, at, calls))
            case "image":
                parts.append(image_part(_image_url(block, at), at, f"{at}.source"))
            case _:
                parts.append(_text(block, at, "user"))
    return results + ([{"role": "user", "content": _content(parts)}] if parts or not results else [])


def _image_url(block: _Block, path: str) -> str:
    """Return the URL of an image block; for base64 data it is a data URL."""
    source, at = block.get("source"), f"{path}.source"
    given: _Block = source if isinstance(source, dict) else {}
    match given.get("type"):
        case "url":
            return _string(given, "url", at)
        case "base64":
            media_type, data = _string(given, "media_type", at), _string(given, "data", at)
            if _MEDIA_TYPE.fullmatch(media_type) is None:
                raise InvalidRequest(f"{at}.media_type is {media_type[:40]!r}, which is not an image type", path)
            return f"data:{media_type};base64,{data}"
    raise InvalidRequest(f"{at} must be an object of type base64 or url", path)


def _assistant(content: Any, path: str) -> Message:
    texts: list[str | Message] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for at, block in _blocks(content, path):
        match block["type"]:
            case "tool_use":
                calls.append(_call(block, at))
            case "thinking":
                thoughts.append(_string(block, "thinking", at))
            case "redacted_thinking":  # encrypted: only the server that sent it can read it
                pass
            case _:
                texts.append(_text(block, at, "assistant"))
    message: Message = {"role": "assistant", "content": [] if calls and not texts else _content(texts)}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message |= dict.fromkeys(("reasoning", "reasoning_content"), "".join(thoughts))
    return message


def _call(block: _Block, path: str) -> dict[str, Any]:
    call_id, name = _string(block, "id", path), _string(block, "name", path)
    arguments = block.get("input")
    if arguments is not None and not isinstance(arguments, dict):
        raise InvalidRequest(f"{path}.input is not an object", f"{path}.input")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments or {}}}


def _result(block: _Block, path: str, calls: frozenset[str]) -> Message:
    call_id = _string(block, "tool_use_id", path)
    if call_id not in calls:
        raise InvalidRequest(
            f"{path}.tool_use_id is {call_id[:80]!r}, but the last assistant message has no tool_use with this id",
            f"{path}.tool_use_id",
        )
    content = block.get("content")
    texts = [_text(one, at, "user") for at, one in _blocks(content, f"{path}.content")] if content else []
    return {"role": "tool", "content": "\n".join(texts), "tool_call_id": call_id}


def _blocks(content: Any, path: str) -> list[tuple[str, _Block]]:
    """Return the blocks of a message's content, each with its path; a string is one block."""
    if isinstance(content, str):
        return [(path, {"type": "text", "text": content})]
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"{path} must be a string or a list of content blocks", path)
    for at, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise InvalidRequest(f"{path}.{at} must be an object with a type", f"{path}.{at}")
    return [(f"{path}.{at}", block) for at, block in enumerate(content)]


def _text(block: _Block, path: str, role: str) -> str:
    kind: str = block["type"]
    if kind == "text":
        return _string(block, "text", path, may_be_empty=True)
    if kind in _MEDIA:
        raise InvalidRequest(f"{path}: {kind} blocks are not supported yet", path)
    raise InvalidRequest(f"{path}: {kind[:40]!r} blocks are not supported in {role} content", path)


def _string(block: _Block, name: str, path: str, *, may_be_empty: bool = False) -> str:
    value = block.get(name)
    if not isinstance(value, str) or not (value or may_be_empty):
        raise InvalidRequest(f"{path}.{name} must be a {'' if may_be_empty else 'non-empty '}string", f"{path}.{name}")
    return value


def _content(parts: Sequence[str | Message]) -> str | list[Message]:
    match [part for part in parts if part]:
        case []:
            return ""
        case [str(text)]:
            return text
        case many:
            return [{"type": "text", "text": part} if isinstance(part, str) else part for part in many]
