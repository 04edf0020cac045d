"""The prompts of `pdserve verify`: text in the model's tokens, of lengths around block and chunk boundaries."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from wire.errors import ConfigError

# One token; around a block of 16; a few blocks; around a chunk of 512; two chunks and a bit.
LENGTHS = (1, 15, 16, 17, 5, 100, 512, 513, 33, 700, 250, 1025)
_TEXTS = (
    "The capital of France is Paris, a city on the Seine known for its museums and its food. ",
    "To boil an egg, bring water to a boil, lower the egg in with a spoon and wait for seven minutes. ",
    "In 1969 two people walked on the Moon while a third one waited for them in orbit. ",
    "def add(a, b):\n    return a + b\n\nprint(add(2, 3))\n",
    "Once upon a time there was a fox who could not sleep, so she counted the stars instead of sheep. ",
)


def texts(count: int) -> list[str]:
    """Return `count` different texts of about these lengths in tokens, for servers that tokenize themselves."""
    made = []
    for number in range(count):
        text = _TEXTS[number % len(_TEXTS)]
        length = 4 * LENGTHS[number % len(LENGTHS)]  # characters
        made.append(f"{number}. {text * (1 + length // len(text))}"[: max(4, length)].rstrip())
    return made


def make_prompts(model: Path, count: int, longest: int) -> list[tuple[int, ...]]:
    """Return `count` prompts of token ids, none longer than `longest`; all different. Raises ConfigError."""
    path = model / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{path} is missing: verify needs it to make prompts")
    if longest < 1:
        raise ConfigError("--max-tokens leaves no room for a prompt: the model's context is too short")
    tokenizer = Tokenizer.from_file(str(path))
    return [_prompt(tokenizer, number, min(LENGTHS[number % len(LENGTHS)], longest)) for number in range(count)]


def _prompt(tokenizer: Tokenizer, number: int, length: int) -> tuple[int, ...]:
    text = _TEXTS[number % len(_TEXTS)]
    ids: Sequence[int] = ()
    repeats = 1
    while len(ids) < length:
        ids = tokenizer.encode(f"{number}. " * (length > 4) + text * repeats, add_special_tokens=False).ids
        repeats *= 2
    return tuple(ids[:length])
