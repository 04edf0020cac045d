"""Where images stand in a rendered chat: the template's placeholders become image tokens, those of users stay text."""

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from images.families import VisionFamily
from scheduler.images.image_part import LoadedImage
from wire.errors import ConfigError, InvalidRequest
from wire.types import PromptImage


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The token ids of a conversation, and the images among them."""

    token_ids: tuple[int, ...]
    images: tuple[PromptImage, ...] = ()


class Placeholders:
    """The placeholder of one model; it is hidden in a conversation's texts while the template is rendered."""

    def __init__(self, family: VisionFamily, tokenizer: Tokenizer) -> None:
        """Raise ConfigError if the tokenizer does not have the family's placeholder.

        `text` is the placeholder; `written` stands for an image in a template that takes only texts.
        """
        text = tokenizer.id_to_token(family.placeholder_id)
        if text is None or tokenizer.encode(text, add_special_tokens=False).ids != [family.placeholder_id]:
            raise ConfigError(f"the tokenizer has no token {family.placeholder_id}, which config.json names for images")
        self.text: str = text
        written = family.written_ids or (family.placeholder_id,)
        self.written = "".join(tokenizer.id_to_token(token_id) or "" for token_id in written)
        self._family = family
        self._tokenizer = tokenizer
        self._hidden = secrets.token_hex(16)
        self._either = re.compile(f"{re.escape(text)}|{self._hidden}")

    def hide(self, value: Any) -> Any:
        """Return the JSON `value` with the placeholder in its texts replaced by one that no template writes."""
        if isinstance(value, str):
            return value.replace(self.text, self._hidden)
        if isinstance(value, dict):
            return {self.hide(key): self.hide(one) for key, one in value.items()}
        return [self.hide(one) for one in value] if isinstance(value, (list, tuple)) else value

    def show(
        self, rendered: str, num_images: int, *, whose: str = "the chat template printed", param: str = "messages"
    ) -> tuple[str, tuple[bool, ...]]:
        """Return the text to encode, and for each placeholder in it whether it is an image.

        Raises InvalidRequest if the number of images differs; `whose` begins the message, `param` is its field.
        """
        is_image = tuple(found == self.text for found in self._either.findall(rendered))
        if sum(is_image) != num_images:
            found, images = f"placeholder{'s' * (sum(is_image) != 1)}", f"image{'s' * (num_images != 1)}"
            raise InvalidRequest(f"{whose} {sum(is_image)} {found} ({self.text}) for {num_images} {images}", param)
        around = self._family.around
        text = rendered.replace(self.text, f"{around}{self.text}{around}") if around else rendered
        return text.replace(self._hidden, self.text), is_image

    def expand(self, ids: Sequence[int], is_image: Sequence[bool], images: Sequence[LoadedImage]) -> ChatPrompt:
        """Return the prompt for `show`'s text, encoded as `ids`: the tokens of each image replace its placeholder."""
        made: list[int] = []
        placed: list[PromptImage] = []
        kinds, left = iter(is_image), iter(images)
        for token_id in ids:
            if token_id != self._family.placeholder_id:
                made.append(token_id)
            elif next(kinds):
                image = next(left)
                start = len(made) + len(self._family.begin_ids)
                made += self._family.ids(image.count)
                placed.append(PromptImage(start, image.count, image.digest, image.grid, image.data, image.dtype))
            else:
                made += self._spelled
        return ChatPrompt(tuple(made), tuple(placed))

    @cached_property
    def _spelled(self) -> list[int]:
        """The ids of the placeholder's text as plain characters: what a tokenizer without that token makes of it."""
        made = json.loads(self._tokenizer.to_str())
        made["added_tokens"] = [token for token in made["added_tokens"] if token["content"] != self.text]
        plain = Tokenizer.from_str(json.dumps(made))
        before, ids = (plain.encode(text, add_special_tokens=False).ids for text in ("x", f"x{self.text}"))
        return [one for one in ids[len(before) :] if one != self._family.placeholder_id]
