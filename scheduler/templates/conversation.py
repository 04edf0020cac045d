"""A conversation in a template's format, optionally with the last message left open for the model. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from scheduler.templates.content_format import ContentFormat

Message = dict[str, Any]

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_MARK = "PDSERVE_CONTINUES_FROM_HERE "  # its trailing space shows whether the template strips


def shaped(messages: Sequence[Mapping[str, Any]], content_format: ContentFormat, image_text: str = "") -> list[Message]:
    """Return the messages without nulls, with contents in the format and reasoning under the names that templates use.

    If the content is one text, the images come first, each as a line with `image_text`, as in vLLM.
    """
    return [_with_reasoning(_convert_message(message, content_format, image_text)) for message in messages]


def left_open(messages: Sequence[Message], template: str) -> tuple[list[Message], str]:
    """Return the messages with a mark after the last one's text, and that text. Raises ValueError if it has none."""
    content = messages[-1].get("content")
    if content is None:
        raise ValueError("continue_final_message: the last message has no content to continue")
    if "content" not in template:
        raise ValueError("continue_final_message: the chat template does not print any content")
    if isinstance(content, str):
        return [*messages[:-1], messages[-1] | {"content": content + _MARK}], content
    last = max((i for i, part in enumerate(content) if "text" in part), default=None)
    if last is None:
        raise ValueError("continue_final_message: the last message has no text to continue")
    text: str = content[last]["text"]
    marked = [*content[:last], content[last] | {"text": text + _MARK}, *content[last + 1 :]]
    return [*messages[:-1], messages[-1] | {"content": marked}], text


def cut_at_mark(rendered: str, text: str) -> str:
    """Return the text before the mark, stripped if the template strips `text`. Raises ValueError if either is missing.

    The rules are those of transformers' `apply_chat_template(continue_final_message=True)`.
    """
    bare = _MARK.strip()
    if text.strip() not in rendered or bare not in rendered:
        raise ValueError("continue_final_message: the chat template does not print the last message unchanged")
    end = rendered.rindex(bare)
    kept = rendered[:end]
    return kept if rendered.startswith(_MARK, end) else kept.rstrip()


def _convert_message(message: Mapping[str, Any], content_format: ContentFormat, image_text: str) -> Message:
    made = {name: value for name, value in message.items() if value is not None}
    content = made.get("content")
    if content_format is ContentFormat.OPENAI and isinstance(content, str) and made.get("role") != "tool":
        made["content"] = [{"type": "text", "text": content}]
    elif content_format is ContentFormat.STRING and isinstance(content, list):
        texts = [part["text"] for part in content if "text" in part]
        made["content"] = "\n".join([image_text for part in content if part.get("type") == "image"] + texts)
    return made


def _with_reasoning(message: Message) -> Message:
    """Add the message's reasoning under the names that templates read."""
    given = next((message[name] for name in _REASONING_FIELDS if name in message), None)
    if given is None:
        return message
    return {"thinking": given, **message, "reasoning_content": given}
