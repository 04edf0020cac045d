"""The flags of `vllm serve` that were typed: those that pdserve reads, and all others as they are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from wire.errors import ConfigError

KV_CONFIG: Final = "kv-transfer-config"
CONNECTOR: Final = "connector"
"""The scheduler's flag: the same one is given to its workers."""
_SHORT: Final[Mapping[str, str]] = {
    "-tp": "tensor-parallel-size", "-dp": "data-parallel-size", "-dpl": "data-parallel-size-local",
    "-pp": "pipeline-parallel-size",
}  # fmt: skip
_WITH_VALUE: Final = frozenset((*_SHORT.values(), "model", "host", "port", KV_CONFIG, CONNECTOR))
_SWITCHES: Final = frozenset(("share-devices", "enable-prompt-tokens-details", "no-enable-prompt-tokens-details"))
_TAKEN: Final = frozenset(("model", KV_CONFIG, CONNECTOR, "share-devices"))
"""Not passed on: the model becomes the first argument, the config is completed, and the others are pdserve's own."""
_SECRET: Final = ("--api-key", "--api_key", "--hf-token", "--hf_token")
HIDDEN: Final = "(hidden)"


@dataclass(frozen=True, slots=True)
class TypedFlags:
    """A command line of `vllm serve` without its model; `values` has the flags that are read, without dashes."""

    passed: tuple[str, ...]
    values: Mapping[str, str]

    def number(self, name: str) -> int | None:
        """Return a flag's whole number above 0, None where it is absent. Raises ConfigError for any other value."""
        text = self.values.get(name)
        if text is None:
            return None
        if not text.isdecimal() or not int(text):
            raise ConfigError(f"--{name} {text!r} is not a whole number above 0")
        return int(text)


def parse(typed: Sequence[str]) -> TypedFlags:
    """Read a command line; the model is its first word or --model. Raises ConfigError for a flag without its value."""
    passed: list[str] = []
    values: dict[str, str] = {}
    waiting = iter(typed)
    for number, word in enumerate(waiting):
        if number == 0 and not word.startswith("-"):
            values["model"] = word
            continue
        name, value = _name(word), None
        if name in _WITH_VALUE:
            value = word.partition("=")[2] if "=" in word else next(waiting, None)
            if not value:
                raise ConfigError(f"--{name} has no value: set one or omit it")
            values[name] = value
        elif name in _SWITCHES:
            values[name] = ""
        if name not in _TAKEN:
            passed += [word] if value is None or "=" in word else [word, value]
    return TypedFlags(tuple(passed), values)


def without_secrets(argv: Sequence[str]) -> list[str]:
    """Return a command line for printing, the values of its secret flags hidden."""
    shown: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        flag, equals, _ = word.partition("=")
        if flag not in _SECRET:
            shown.append(word)
            continue
        shown.append(f"{flag}={HIDDEN}" if equals else flag)
        values = list(takewhile(lambda one: not one.startswith("-"), rest))
        del rest[: len(values)]
        shown += [HIDDEN] * len(values)
    return shown


def _name(word: str) -> str:
    """Return a flag's name without dashes, "" for any other word."""
    flag = word.partition("=")[0]
    return _SHORT.get(flag) or (flag[2:].replace("_", "-") if flag.startswith("--") else "")
