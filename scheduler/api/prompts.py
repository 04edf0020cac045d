"""The two ways to say what to continue: `prompt` in its four forms, and `messages`."""

from typing import Any

from scheduler.tokens import Tokens
from wire.errors import InvalidRequest, PromptTooLong

Prompt = str | tuple[int, ...]
_MESSAGE_EXTRAS = ("name", "reasoning_content")


def read_prompts(value: Any, *, max_prompts: int, max_model_len: int) -> tuple[Prompt, ...]:
    """Return the prompts of a text, a list of texts, a list of token ids or a list of such lists."""
    _check_sizes(value, max_prompts, max_model_len)
    if isinstance(value, str):
        prompts: tuple[Prompt, ...] = (value,)
    elif _is_list_of(value, str):
        prompts = tuple(value)
    elif _is_list_of(value, int):
        prompts = (tuple(value),)
    elif _is_list_of(value, list) and all(not item or _is_list_of(item, int) for item in value):
        prompts = tuple(tuple(item) for item in value)
    else:
        raise InvalidRequest(
            "prompt must be a text, a list of texts, a list of token ids or a list of lists of token ids, none empty",
            "prompt",
        )
    if len(prompts) > max_prompts:
        raise InvalidRequest(f"the request has {len(prompts)} prompts; at most {max_prompts} are allowed", "prompt")
    for prompt in prompts:
        if not prompt:
            raise InvalidRequest("an empty prompt cannot be continued", "prompt")
    return prompts


def _check_sizes(value: Any, max_prompts: int, max_model_len: int) -> None:
    """Refuse huge lists by their length alone, before anything walks through them."""
    lists = [value, *value[:max_prompts]] if isinstance(value, list) else []
    longest = max((len(item) for item in lists if isinstance(item, list)), default=0)
    if longest > max(max_model_len, max_prompts):
        raise PromptTooLong(
            f"This model's maximum context length is {max_model_len} tokens; the prompt has {longest}", "prompt"
        )


async def encode_prompt(prompt: Prompt, tokens: Tokens, *, add_special_tokens: bool) -> tuple[int, ...]:
    """Return the prompt's token ids. Raises InvalidRequest for an id outside the vocabulary."""
    if isinstance(prompt, str):
        ids = await tokens.encode(prompt, add_special_tokens=add_special_tokens)
        if not ids:
            raise InvalidRequest("the prompt has no tokens", "prompt")
        return ids
    check_token_ids(prompt, tokens, "prompt")
    return prompt


def check_token_ids(token_ids: tuple[int, ...], tokens: Tokens, param: str) -> None:
    """Raise InvalidRequest if an id is not one that the model knows."""
    if min(token_ids) < 0 or max(token_ids) >= tokens.vocab_size:
        wrong = next(item for item in token_ids if not 0 <= item < tokens.vocab_size)
        raise InvalidRequest(
            f"{param}: token id {wrong} is out of vocabulary: ids are 0..{tokens.vocab_size - 1}", param
        )


def read_messages(value: Any) -> list[dict[str, str]]:
    """Return the conversation as templates take it: roles and texts."""
    if not isinstance(value, list) or not value:
        raise InvalidRequest("messages must be a list of at least one message", "messages")
    return [_message(item, f"messages.{index}") for index, item in enumerate(value)]


def _message(value: Any, path: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path} is not an object", path)
    role = value.get("role")
    if not isinstance(role, str) or not 1 <= len(role) <= 64:
        raise InvalidRequest(f"{path}.role must be a text, as user, system or assistant", f"{path}.role")
    if role in ("tool", "function") or value.get("tool_calls") or value.get("function_call"):
        raise InvalidRequest(f"{path}: tools are not supported yet", path)
    extras = {name: text for name in _MESSAGE_EXTRAS if isinstance(text := value.get(name), str)}
    return {"role": role, "content": _content(value.get("content"), f"{path}.content")} | extras


def _content(value: Any, path: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"{path} must be a text or a list of text parts", path)
    return "\n".join(_part(item, f"{path}.{index}") for index, item in enumerate(value))


def _part(value: Any, path: str) -> str:
    part = value if isinstance(value, dict) else {}
    kind, text = part.get("type"), part.get("text")
    if kind == "text" and isinstance(text, str):
        return text
    if isinstance(kind, str) and kind != "text":
        raise InvalidRequest(f"{path}: {kind[:40]} parts are not supported yet: this model takes text only", path)
    raise InvalidRequest(f'{path} must be {{"type": "text", "text": …}}', path)


def _is_list_of(value: Any, kind: type) -> bool:
    """True and False are no token ids."""
    return isinstance(value, list) and bool(value) and all(type(item) is kind for item in value)
