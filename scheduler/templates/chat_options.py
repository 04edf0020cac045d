"""How a conversation becomes a prompt: options of the request and settings of the scheduler."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wire.errors import ConfigError, InvalidRequest

CONTENT_FORMATS = ("auto", "string", "openai")
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MAX_KWARGS_BYTES = 64 * 2**10
MAX_TEMPLATE_BYTES = 256 * 2**10

_OWN_FIELDS = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template")
_OF_APPLY_CHAT_TEMPLATE = (
    "self", "conversation", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "tokenizer_kwargs", "return_assistant_tokens_mask", "sanitize_control_tokens",
)  # fmt: skip
RESERVED_KWARGS = frozenset((*_OWN_FIELDS, *_OF_APPLY_CHAT_TEMPLATE, *SPECIAL_TOKEN_NAMES))
"""Names that `chat_template_kwargs` may not set: fields of the request, and arguments of apply_chat_template."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """A request's template options. `template` is the request's own, which takes precedence over the model's.

    `continue_final_message` leaves the last message open for the model to continue; callers refuse it together with
    `add_generation_prompt`. `add_special_tokens` adds the tokenizer's special tokens to the rendered text.
    """

    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    continue_final_message: bool = False
    template: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    documents: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """The scheduler's settings for chat templates."""

    content_format: str = "auto"
    trust_request_template: bool = True
    default_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def check(self, options: ChatOptions) -> None:
        """Raise InvalidRequest if a request sets template options that are invalid or not allowed."""
        if options.template is not None:
            self._check_template(options.template)
        if options.template_kwargs:
            _check_kwargs(options.template_kwargs)
        for index, document in enumerate(options.documents):
            if not isinstance(document, Mapping):
                raise InvalidRequest(f"documents.{index} is not an object", f"documents.{index}")

    def _check_template(self, template: str) -> None:
        if not self.trust_request_template:
            raise InvalidRequest(
                "chat_template_not_allowed: this server accepts no templates in requests (the default with API keys); "
                "--trust-request-chat-template allows them",
                "chat_template",
            )
        if not template.strip():
            raise InvalidRequest("chat_template is empty: leave it out to use the model's", "chat_template")
        if (num_bytes := len(template.encode(errors="replace"))) > MAX_TEMPLATE_BYTES:
            raise InvalidRequest(
                f"chat_template has {num_bytes} bytes, but the limit is {MAX_TEMPLATE_BYTES}", "chat_template"
            )


def checked_kwargs(text: str) -> str:
    """Return the text of `--default-chat-template-kwargs` unchanged. Raises ConfigError if it is not valid."""
    parse_kwargs(text)
    return text


def parse_kwargs(text: str) -> Mapping[str, Any]:
    """Return the object of `--default-chat-template-kwargs`; an empty text is an empty object. Raises ConfigError."""
    if not text:
        return {}
    import orjson  # late: every launch parses flags, but few set this one

    try:
        kwargs = orjson.loads(text)
        if not isinstance(kwargs, dict):
            raise ConfigError(f'{text!r} is not a JSON object such as {{"enable_thinking": false}}')
        _check_kwargs(kwargs)
    except (orjson.JSONDecodeError, InvalidRequest) as error:
        raise ConfigError(f"{text!r}: {error}") from None
    return kwargs


def _check_kwargs(kwargs: Mapping[str, Any]) -> None:
    import orjson

    name = "chat_template_kwargs"
    for key in kwargs:
        if key in RESERVED_KWARGS:
            raise InvalidRequest(f"{name}.{key} is reserved: it may not be set there", f"{name}.{key}")
    try:
        num_bytes = len(orjson.dumps(kwargs))
    except orjson.JSONEncodeError as error:
        raise InvalidRequest(f"{name} cannot be written as JSON: {error}", name) from None
    if num_bytes > MAX_KWARGS_BYTES:
        raise InvalidRequest(f"{name} has {num_bytes} bytes, but the limit is {MAX_KWARGS_BYTES}", name)
