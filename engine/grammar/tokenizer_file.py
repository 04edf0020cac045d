"""The tokenizer and model that grammars are compiled for."""

import json
from dataclasses import dataclass
from pathlib import Path

from wire.errors import InvalidGrammar


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """A tokenizer.json and properties of the model: ids that end a sequence, and the width of its logits."""

    path: str
    eos_token_ids: tuple[int, ...]
    vocab_size: int

    def read(self) -> str:
        """Return the file's text. Raises InvalidGrammar if it cannot be read: no grammar can be compiled."""
        try:
            return Path(self.path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"  # clients get no server path
            raise InvalidGrammar(f"structured output needs the model's tokenizer.json: {reason}") from error

    def to_json(self) -> str:
        """Return this as JSON for `from_json`."""
        return json.dumps([self.path, self.eos_token_ids, self.vocab_size])

    @classmethod
    def from_json(cls, text: str) -> "TokenizerFile":
        """Read the JSON of `to_json`."""
        path, eos_token_ids, vocab_size = json.loads(text)
        return cls(str(path), tuple(eos_token_ids), int(vocab_size))
