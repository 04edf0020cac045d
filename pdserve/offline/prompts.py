"""Convert the accepted forms of prompts and parameters to lists. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict, TypeVar

from pdserve.offline.images import prompt_images

T = TypeVar("T")


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    multi_modal_data: NotRequired[Mapping[str, Any]]
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


OnePrompt = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]
Prompts = OnePrompt | Sequence[OnePrompt]


@dataclass(frozen=True, slots=True)
class PromptInput:
    """One prompt: its token ids if given, else its text, with the data URLs of the images for its placeholders."""

    text: str | None
    token_ids: Sequence[int] | None = None
    cache_salt: str | None = None
    images: tuple[str, ...] = ()


def read_prompts(given: Prompts | None, *, takes_images: bool = False) -> list[PromptInput]:
    """Return a list of one or several prompts. Raises TypeError or ValueError with the number of a wrong one."""
    prompts = _read_all(given)
    for index, prompt in enumerate(prompts):
        if prompt.images and not takes_images:
            raise ValueError(f"prompt {index} has multi_modal_data: only generate and chat take images")
        if prompt.images and prompt.token_ids is not None:
            raise ValueError(f"prompt {index} has multi_modal_data and prompt_token_ids: pass its text as prompt")
    return prompts


def conversations(given: Sequence[Any]) -> list[list[Mapping[str, Any]]]:
    """Return a list of one or several conversations. Raises TypeError or ValueError with the number of a wrong one."""
    many = [given] if given and all(isinstance(message, Mapping) for message in given) else list(given)
    for index, messages in enumerate(many):
        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
            raise TypeError(f"conversation {index} is {type(messages).__name__}: pass a list of messages")
        if not messages:
            raise ValueError(f"conversation {index} has no message")
    return [list(messages) for messages in many]


def one_each(given: T | Sequence[T] | None, count: int, default: T, name: str) -> list[T]:
    """Return one value for each of `count` prompts. Raises ValueError for any other number of values."""
    if given is None:
        return [default] * count
    if not isinstance(given, Sequence) or isinstance(given, str):
        return [given] * count  # T itself is not a sequence
    if len(given) != count:
        numbers = f"the number of {name} is {len(given)}, but the number of prompts is {count}"
        raise ValueError(f"{numbers}: pass one for all, or one each")
    return list(given)


def _read_all(given: Prompts | None) -> list[PromptInput]:
    if given is None:
        raise TypeError("prompts is None: pass one prompt or a list")
    if isinstance(given, str | bytes | Mapping) or _is_ids(given) or not isinstance(given, Iterable):
        return [_read(0, given)]
    if not isinstance(given, Sequence):
        given = list(given)
    return [_read(index, one) for index, one in enumerate(given)]


def _read(index: int, given: Any) -> PromptInput:
    if isinstance(given, str):
        return _check_not_empty(index, PromptInput(given))
    if isinstance(given, Mapping):
        return _of_mapping(index, given)
    if _is_ids(given):
        return PromptInput(None, given)
    if isinstance(given, Sequence) and not given:
        raise ValueError(f"prompt {index} is empty: there is nothing to continue")
    raise TypeError(
        f"prompt {index} is a value of type {type(given).__name__}: pass a string, a list of token ids, "
        '{"prompt": "..."} or {"prompt_token_ids": [...]}'
    )


def _of_mapping(index: int, given: Mapping[str, Any]) -> PromptInput:
    for name in ("prompt_embeds", "encoder_prompt"):
        if given.get(name) is not None:
            raise ValueError(f"prompt {index} has {name}: prompts are texts or token ids")
    text, ids, salt = given.get("prompt"), given.get("prompt_token_ids"), given.get("cache_salt")
    images = prompt_images(index, given.get("multi_modal_data"))
    if ids is not None:
        if not _is_ids(ids):
            raise ValueError(f"prompt {index}: prompt_token_ids must be a non-empty list of token ids")
        return PromptInput(text, ids, salt, images)
    if not isinstance(text, str):
        raise ValueError(f"prompt {index} has neither prompt nor prompt_token_ids")
    return _check_not_empty(index, PromptInput(text, None, salt, images))


def _check_not_empty(index: int, prompt: PromptInput) -> PromptInput:
    if not prompt.text:
        raise ValueError(f"prompt {index} is empty: there is nothing to continue")
    return prompt


def _is_ids(given: Any) -> bool:
    """Return whether this is a non-empty list of integers, booleans excluded."""
    return (
        isinstance(given, Sequence)
        and not isinstance(given, str | bytes)
        and bool(given)
        and all(isinstance(item, int) and not isinstance(item, bool) for item in given)
    )
