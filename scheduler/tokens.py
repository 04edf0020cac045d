"""Convert between text and token ids: one model's tokenizer and chat template. Imports no torch or transformers."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from scheduler.images.image_part import LoadedImage, images_in, without_images
from scheduler.images.placeholders import ChatPrompt, Placeholders
from scheduler.model.files import ModelFiles
from scheduler.side_threads import SideThreads
from scheduler.templates.chat_options import ChatOptions, ChatSettings
from scheduler.templates.templates import TemplateRenderer
from scheduler.tokenizer.byte_level import byte_level_of
from scheduler.tokenizer.pairs import encode_pair, first_tokens
from scheduler.tokenizer.shared_ids import SharedIds
from scheduler.tokenizer.token_texts import TokenTexts
from wire.errors import ConfigError, InvalidRequest, PromptTooLong

_SHORT_CHARS = 2000  # below this a thread costs more than the work
_AS_USUAL = ChatOptions()
_NO_SETTINGS = ChatSettings()


class Tokens:
    """Encodes prompts and decodes outputs of one model; thread-safe."""

    def __init__(
        self, files: ModelFiles, settings: ChatSettings = _NO_SETTINGS, renderer: TemplateRenderer | None = None
    ) -> None:
        self.files = files
        self._settings = settings
        self.max_model_len = files.max_model_len
        self._tokenizer = _load(files)
        self._renderer = renderer or TemplateRenderer()
        self._placeholders = None if files.vision is None else Placeholders(files.vision.family, self._tokenizer)
        self.texts = TokenTexts(self._tokenizer)
        self.byte_level = byte_level_of(self._tokenizer)
        self._threads = SideThreads()
        added = self._tokenizer.get_added_tokens_decoder()
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size: int = files.vocab_size or len(vocab)
        self.shared_ids = SharedIds(self.vocab_size)
        self.eos_token_ids = _eos_ids(files, vocab)
        self._longest_token_chars = max(map(len, vocab), default=1)
        self._bos_id = vocab.get(files.special_tokens.get("bos_token", ""))
        self._eos_id = vocab.get(files.special_tokens.get("eos_token", ""))

    async def encode(
        self, text: str, *, add_special_tokens: bool, param: str = "prompt", bounded: bool = True
    ) -> tuple[int, ...]:
        """Return the ids of `text`; long texts are encoded off the event loop.

        Raises PromptTooLong for a `bounded` text that exceeds the model's maximum length however it is tokenised.
        """
        if bounded:
            self._check_chars(len(text), param)
        if len(text) <= _SHORT_CHARS:
            return self._encode(text, add_special_tokens)
        return await self._threads.run(self._encode, text, add_special_tokens)

    async def shorten(self, text: str, limit: int) -> str:
        """Return the part of `text` that its first `limit` tokens spell, without special tokens."""
        if len(text) <= _SHORT_CHARS:
            return first_tokens(self._tokenizer, text, limit)
        return await self._threads.run(first_tokens, self._tokenizer, text, limit)

    async def encode_pair(
        self, first: str, second: str, *, longest: int | None, param: str = "text_2"
    ) -> tuple[tuple[int, ...], int]:
        """Return the ids of two texts for a cross-encoder, and where the second one's begin.

        See tokenizer/pairs.py. Raises PromptTooLong as `encode` does, for texts that are not truncated to `longest`.
        """
        if longest is None:
            self._check_chars(len(first) + len(second), param)
        if len(first) + len(second) <= _SHORT_CHARS:
            return encode_pair(self._tokenizer, first, second, longest)
        return await self._threads.run(encode_pair, self._tokenizer, first, second, longest)

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions = _AS_USUAL
    ) -> tuple[int, ...]:
        """Return the ids of a rendered conversation. Raises InvalidRequest, PromptTooLong, Overloaded."""
        return (await self.chat_prompt(messages, options)).token_ids

    async def chat_prompt(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions = _AS_USUAL) -> ChatPrompt:
        """Return the ids of a rendered conversation, and its images, which are loaded. Raises as `encode_chat` does."""
        text = await self.render_chat(messages, options)
        images, holders, is_image = tuple(images_in(messages)), self._placeholders, tuple[bool, ...]()
        if holders is not None:
            text, is_image = holders.show(text, len(images))
        ids = await self.encode(text, add_special_tokens=options.add_special_tokens, param="messages")
        return ChatPrompt(ids) if holders is None else holders.expand(ids, is_image, images)

    async def text_prompt(self, text: str, images: Sequence[LoadedImage], *, add_special_tokens: bool) -> ChatPrompt:
        """Return the ids of a text with placeholders for these images. Raises as `encode` does, and InvalidRequest."""
        holders = self._placeholders
        assert holders is not None, "images are loaded for vision models only"
        text, is_image = holders.show(text, len(images), whose="the prompt has", param="prompt")
        ids = await self.encode(text, add_special_tokens=add_special_tokens)
        return holders.expand(ids, is_image, images)

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions = _AS_USUAL) -> str:
        """Return the rendered text of a conversation: images are placeholders; placeholders in its texts are hidden.

        Raises InvalidRequest, Overloaded, Unavailable.
        """
        self._settings.check(options)
        template = self.files.chat_template if options.template is None else options.template
        if options.tools and options.template is None and self.files.tool_template is not None:
            template = self.files.tool_template
        if template is None:
            raise InvalidRequest(
                "the model has no chat template: start the scheduler with --chat-template, or use /v1/completions",
                "messages",
            )
        context = {
            **self.files.special_tokens,
            **self._settings.default_kwargs,
            **self._hidden(options.template_kwargs),
            "messages": self._hidden(without_images(messages)),
            "tools": self._hidden(options.tools),
            "documents": self._hidden(options.documents) or None,
            "add_generation_prompt": options.add_generation_prompt,
        }
        return await self._renderer.render(
            template,
            context,
            content_format=self._settings.content_format,
            continue_final_message=options.continue_final_message,
            of_request=options.template is not None,
            image_text="" if self._placeholders is None else self._placeholders.written,
        )

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; unknown ids have none."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def spellings(self, token_ids: Sequence[int]) -> list[str | None]:
        """Return each token in the vocabulary's spelling; None for an unknown id."""
        return [self._tokenizer.id_to_token(token_id) for token_id in token_ids]

    def token_id(self, text: str) -> int | None:
        """Return the id of the token that is this text, None if there is none."""
        found: int | None = self._tokenizer.token_to_id(text)
        return found

    @property
    def default_kwargs(self) -> Mapping[str, Any]:
        """The scheduler's variables for chat templates; those of a request take precedence."""
        return self._settings.default_kwargs

    def special_among(self, texts: Sequence[str]) -> frozenset[int]:
        """Return the ids of those texts that are special tokens."""
        found = map(self._tokenizer.token_to_id, texts)
        return frozenset(token_id for token_id in found if token_id in self.special_ids)

    async def start(self) -> None:
        """Start the process that renders chat templates, and compile the model's template.

        Raises ConfigError if the operator's template cannot be compiled, InvalidRequest if the model's cannot,
        Unavailable if the process does not start.
        """
        if self.files.chat_template is None:
            return
        try:
            await self._renderer.start(self.files.chat_template)
        except InvalidRequest as error:
            if not self.files.chat_template_given:
                raise
            raise ConfigError(f"--chat-template: {error}") from error

    async def close(self) -> None:
        """Stop the process that renders chat templates, and the encoding threads."""
        self._threads.close()
        await self._renderer.close()

    def _hidden(self, value: Any) -> Any:
        return value if self._placeholders is None else self._placeholders.hide(value)

    def _check_chars(self, num_chars: int, param: str) -> None:
        at_least = num_chars // self._longest_token_chars
        if at_least > self.max_model_len:
            raise PromptTooLong(
                f"This model's maximum context length is {self.max_model_len} tokens; the prompt has {num_chars} "
                f"characters, which are at least {at_least} tokens",
                param,
            )

    def _encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        ids = self.shared_ids.of(encoding.ids)
        return self._with_ends(ids) if add_special_tokens else ids

    def _with_ends(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Apply tokenizer_config.json's add_bos_token and add_eos_token, which tokenizer.json may lack."""
        bos, eos = self._bos_id, self._eos_id
        if self.files.add_bos_token and bos is not None and ids[:1] != (bos,):
            ids = (bos, *ids)
        if self.files.add_eos_token and eos is not None and ids[-1:] != (eos,):
            ids = (*ids, eos)
        return ids


def _load(files: ModelFiles) -> Tokenizer:
    path = files.folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{path} is missing: convert the model's tokenizer to tokenizer.json first")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise ConfigError(f"{path} is not a tokenizer: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _eos_ids(files: ModelFiles, vocab: Mapping[str, int]) -> tuple[int, ...]:
    named = vocab.get(files.eos_token) if files.eos_token is not None else None
    return tuple(dict.fromkeys((*files.eos_token_ids, *(() if named is None else (named,)))))
