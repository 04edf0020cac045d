"""Byte-level tokenizers decode token by token: one table lookup of bytes each."""

import json
from typing import Any

from tokenizers import Tokenizer


class ByteLevel(dict[int, bytes]):
    """The bytes that each token of one tokenizer decodes to, filled on first use; an unknown id has none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> bytes:
        """Return a token's bytes; one with a character outside the byte alphabet is plain text, as in the decoder."""
        token = self._tokenizer.id_to_token(token_id) or ""
        try:
            found = token.translate(_LATIN_1).encode("latin-1")
        except UnicodeEncodeError:
            found = token.encode()
        self[token_id] = found
        return found


def byte_level_of(tokenizer: Tokenizer) -> ByteLevel | None:
    """Return the bytes of a tokenizer whose decoder is only byte-level, None for any other."""
    if tokenizer.decoder is None:
        return None
    decoder: Any = json.loads(tokenizer.decoder.__getstate__())
    return ByteLevel(tokenizer) if decoder.get("type") == "ByteLevel" else None


def _latin_1() -> dict[int, int]:
    """Return the byte, as a Latin-1 character, of each character of GPT-2's alphabet.

    Printable bytes are their own characters; the others have characters from U+0100 on. Other characters below U+0100
    map to U+FFFF, which is not Latin-1.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return dict.fromkeys(others, 0xFFFF) | {0x100 + at: byte for at, byte in enumerate(others)}


_LATIN_1 = _latin_1()
