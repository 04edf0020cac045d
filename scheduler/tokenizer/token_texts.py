"""The text and the bytes of single tokens, for log probabilities."""

import functools
import json
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

_CACHED = 65_536


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token's text and its bytes; a partial character is a replacement character in the text."""

    text: str
    data: bytes


class TokenTexts:
    """Reads the vocabulary's own spelling, which keeps the space before a word and the bytes of a partial character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.special = frozenset(token_id for token_id, token in added.items() if token.special)
        kinds = _decoder_kinds(tokenizer)
        self._is_byte_level = "ByteLevel" in kinds
        self._has_metaspace = "Metaspace" in kinds or "ByteFallback" in kinds
        self._byte_of = {char: byte for byte, char in enumerate(_byte_chars())}
        self.of = functools.lru_cache(maxsize=_CACHED)(self._read)

    def _read(self, token_id: int) -> TokenText:
        """Return the text and bytes of token `token_id`; both are empty for an unknown id."""
        if token_id in self._added:
            return _from_text(self._added[token_id])
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return TokenText("", b"")
        if self._is_byte_level and all(char in self._byte_of for char in token):
            return _from_bytes(bytes(self._byte_of[char] for char in token))
        if self._has_metaspace:
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                return _from_bytes(bytes.fromhex(token[3:5]))
            return _from_text(token.replace("\u2581", " "))
        return _from_text(str(self._tokenizer.decode([token_id], skip_special_tokens=False)))


def _from_text(text: str) -> TokenText:
    return TokenText(text, text.encode("utf-8", "replace"))


def _from_bytes(data: bytes) -> TokenText:
    return TokenText(data.decode("utf-8", "replace"), data)


def _decoder_kinds(tokenizer: Tokenizer) -> set[str]:
    """Return the types of the tokenizer's decoder and of its sub-decoders."""
    if tokenizer.decoder is None:
        return set()
    decoder: Any = json.loads(tokenizer.decoder.__getstate__())
    return {decoder.get("type", ""), *(part.get("type", "") for part in decoder.get("decoders", ()))}


def _byte_chars() -> list[str]:
    """Return the character that byte-level vocabularies use for each byte: printable ones map to themselves."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(0x100)]
