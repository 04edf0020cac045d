"""The offset, in characters, at which each token of a completion begins; hidden special tokens have no width."""

import codecs

from scheduler.tokenizer.token_texts import TokenTexts


class TextOffsets:
    """Counts the characters of one choice: `echo` is the text before it, "" for none."""

    def __init__(self, texts: TokenTexts, echo: str, *, skips_special: bool) -> None:
        self._texts = texts
        self._echo = echo
        self._skips_special = skips_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # a character may span several tokens
        self._at = 0

    def of_prompt(self, token_id: int) -> int:
        """Return the offset of the prompt's next token in `echo`, which may lack special tokens and a leading space."""
        at, text = self._at, self._texts.of(token_id).text
        if token_id in self._texts.special:
            self._at += len(text) if self._echo.startswith(text, at) else 0
        else:
            dropped = at == 0 and text.startswith(" ") and not self._echo.startswith(" ")
            self._at += self._num_chars(token_id) - dropped
        return at

    def of_output(self, token_id: int) -> int:
        """Return the offset of the next output token."""
        at = self._at
        if not (self._skips_special and token_id in self._texts.special):
            self._at += self._num_chars(token_id)
        return at

    def _num_chars(self, token_id: int) -> int:
        return len(self._utf8.decode(self._texts.of(token_id).data))
