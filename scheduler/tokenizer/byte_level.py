"""What byte-level tokenizers decode token by token: bytes, one table lookup each."""

import json
from typing import Any

from tokenizers import Tokenizer


class ByteLevel:
    """The bytes of every token of one tokenizer; those asked for are kept."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that a token decodes to; an id without a token has none."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._read(token_id)
        return known

    def _read(self, token_id: int) -> bytes:
        """A token with a character that stands for no byte is text as it is, as the decoder has it."""
        token = self._tokenizer.id_to_token(token_id) or ""
        try:
            return bytes(_BYTES[char] for char in token)
        except KeyError:
            return token.encode()


def byte_level_of(tokenizer: Tokenizer) -> ByteLevel | None:
    """Return the bytes of a tokenizer whose decoder is byte-level and nothing else, None for any other."""
    if tokenizer.decoder is None:
        return None
    told: Any = json.loads(tokenizer.decoder.__getstate__())
    return ByteLevel(tokenizer) if told.get("type") == "ByteLevel" else None


def _byte_chars() -> dict[str, int]:
    """Return the byte of each character of GPT-2's alphabet: printable ones as they are, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_BYTES = _byte_chars()
