"""Convert one sequence's token ids to text, one token at a time, never splitting a character."""

import codecs
from collections.abc import Sequence
from typing import Protocol

from scheduler.tokenizer.byte_level import ByteLevel
from scheduler.tokens import Tokens

_BROKEN = "\ufffd"
_MAX_PARTS = 3  # a UTF-8 character is 4 bytes at most, so 3 tokens at most may end inside it
_MAX_WINDOW = 16
_KEPT_WINDOW = 8


class Detokenizer(Protocol):
    """Converts tokens to text; all implementations pass the same tests."""

    def push(self, token_id: int) -> str:
        """Return the text completed by `token_id`: often one token's, sometimes none."""
        ...

    def flush(self) -> str:
        """Return the text held back, at the end of the sequence."""
        ...


def detokenizer_of(
    tokens: Tokens, *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True,
    context: Sequence[int] = (), kept: frozenset[int] = frozenset(),
) -> Detokenizer:  # fmt: skip
    """Return the detokenizer of one sequence.

    `context` are the last prompt ids, so that the first word keeps its space. Without `spaces_between_special_tokens`
    the space that some decoders insert between two special tokens is removed. Tokens in `kept` are never skipped.
    """
    skipped = tokens.special_ids if skip_special_tokens else frozenset[int]()
    if kept:
        skipped -= kept
    level = tokens.byte_level
    decoder = WindowDecoder(tokens, skipped, context) if level is None else ByteDecoder(level, skipped, context)
    return decoder if spaces_between_special_tokens else WithoutSpaces(decoder, tokens.special_ids)


class WithoutSpaces:
    """Removes the space before each special token that follows another one."""

    def __init__(self, decoder: Detokenizer, special_ids: frozenset[int]) -> None:
        self._decoder = decoder
        self._special_ids = special_ids
        self._after_special = False
        self.flush = decoder.flush

    def push(self, token_id: int) -> str:
        """Return the text completed by `token_id`."""
        new, is_special = self._decoder.push(token_id), token_id in self._special_ids
        if is_special and self._after_special:
            new = new.removeprefix(" ")
        self._after_special = is_special
        return new


class ByteDecoder:
    """Decodes a byte-level tokenizer's bytes as UTF-8, without `skipped` tokens; holds back incomplete characters."""

    def __init__(self, level: ByteLevel, skipped: frozenset[int] = frozenset(), context: Sequence[int] = ()) -> None:
        self._level = level
        self._skipped = skipped
        self._rest = b""
        for token_id in context:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """Return the text completed by `token_id`."""
        if token_id in self._skipped:
            return ""
        data = self._rest + self._level[token_id]
        text, num_bytes = codecs.utf_8_decode(data, "replace")
        self._rest = data[num_bytes:]
        return text

    def flush(self) -> str:
        """Return the text held back, at the end of the sequence."""
        data, self._rest = self._rest, b""
        return data.decode(errors="replace")


class WindowDecoder:
    """Decodes a sliding window: the tokens of the last complete text, for spacing, and those after it.

    `skipped` tokens are left out. A window that ends within a character is held back until the character is complete
    or can no longer be completed.
    """

    def __init__(self, tokens: Tokens, skipped: frozenset[int] = frozenset(), context: Sequence[int] = ()) -> None:
        self._tokens = tokens
        self._skipped = skipped
        self._window = [token_id for token_id in context if token_id not in skipped]
        text = self._decode()
        self._sent = len(text) - _broken_end(text)
        self._whole = len(self._window)  # the window's tokens up to here end at a character boundary

    def push(self, token_id: int) -> str:
        """Return the text completed by `token_id`."""
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._decode()
        broken = _broken_end(text)
        if broken and len(self._window) - self._whole <= _MAX_PARTS:
            return ""
        whole = len(text) - min(broken, _MAX_PARTS)
        new = text[self._sent : whole]
        self._sent = max(self._sent, whole)
        if not broken and new:
            self._shift_window(self._whole, len(text))
        elif len(self._window) > _MAX_WINDOW:
            self._shift_window(len(self._window) - _KEPT_WINDOW, len(text))
        if not broken:
            self._whole = len(self._window)
        return new

    def flush(self) -> str:
        """Return the text held back, at the end of the sequence."""
        text = self._decode()
        new, self._sent = text[self._sent :], len(text)
        return new

    def _shift_window(self, start: int, num_chars: int) -> None:
        """Drop the window's tokens before `start`, keeping the number of unsent characters among its `num_chars`."""
        unsent = num_chars - self._sent
        del self._window[:start]
        self._whole = max(0, self._whole - start)
        self._sent = max(0, len(self._decode()) - unsent)

    def _decode(self) -> str:
        return self._tokens.decode(self._window, skip_special_tokens=False) if self._window else ""


def _broken_end(text: str) -> int:
    return len(text) - len(text.rstrip(_BROKEN))
