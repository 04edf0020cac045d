"""Convert a command line with vLLM's flags into one with only pdserve's. Pure.

typed -> groups (a flag and its arguments) -> each kept, converted, dropped with a notice, or refused
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from pdserve.flags.row import Arity, FlagVerdict, VllmFlag
from pdserve.flags.table import dashed, find, find_opposite, nearest
from wire.errors import ConfigError

_FLAG = re.compile(r"(--?[A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_LEVEL = re.compile(r"-O(\d)")
_BOOLEANS = ("true", "false")


@dataclass(frozen=True, slots=True)
class Settled:
    """A command line of pdserve's flags, and the rows of the dropped flags."""

    argv: tuple[str, ...]
    without_effect: tuple[VllmFlag, ...]


@dataclass(frozen=True, slots=True)
class _Group:
    """A flag as typed, the value after its `=`, and the following arguments; before the first flag, `flag` is empty."""

    flag: str
    inline: str | None
    words: tuple[str, ...]

    @property
    def typed(self) -> tuple[str, ...]:
        if not self.flag:
            return self.words
        return (self.flag if self.inline is None else f"{self.flag}={self.inline}", *self.words)


def settle(argv: Sequence[str], known: Collection[str]) -> Settled:
    """Return `argv` with only flags in `known`, those of the command itself.

    Raises ConfigError for a refused flag, with the reason, and for an unknown one, with the most similar known flag.
    """
    kept: list[str] = []
    dropped: dict[str, VllmFlag] = {}
    end = list(argv).index("--") if "--" in argv else len(argv)
    for group in _groups(argv[:end]):
        row = find(group.flag) or find_opposite(group.flag)
        name = dashed(group.flag)
        if row is not None and row.verdict is FlagVerdict.SUPPORTED and (row.our_name or row.name) in known:
            kept += _convert_group(group, row)
        elif group.flag in known or not group.flag:
            kept += group.typed
        elif name in known:
            kept += _Group(name, group.inline, group.words).typed
        elif row is None:
            kept += _pass_unknown(group, known)
        else:
            dropped[row.name] = row
            kept += _after_dropped(group, row, argv)
    return Settled((*kept, *argv[end:]), tuple(dropped.values()))


def notice(rows: Collection[VllmFlag]) -> str:
    """Return one notice for all dropped flags, with the reason for each."""
    return "without effect: " + "; ".join(f"{row.name} ({row.why})" for row in rows)


def _groups(argv: Sequence[str]) -> Iterator[_Group]:
    flag, inline, words = "", None, list[str]()
    for word in argv:
        match = _FLAG.fullmatch(word)
        if match is None:
            words.append(word)
            continue
        yield _Group(flag, inline, tuple(words))
        level = _LEVEL.fullmatch(word)
        flag, inline, words = ("-O", level[1], []) if level else (match[1], match[2], [])
    yield _Group(flag, inline, tuple(words))


def _convert_group(group: _Group, row: VllmFlag) -> tuple[str, ...]:
    """Return a supported flag with our name and value; it is omitted if the value is `None`, which means unset."""
    name = row.our_name or row.name
    value = group.inline if group.inline is not None else next(iter(group.words), None)
    if row.arity is not Arity.ONE or value is None:
        return _Group(name, group.inline, group.words).typed
    if value != "None" and row.convert is None and group.flag == name:
        return group.typed
    rest = group.words if group.inline is not None else group.words[1:]
    if value == "None":
        return rest
    return (f"{name}={row.convert(value) if row.convert else value}", *rest)


def _after_dropped(group: _Group, row: VllmFlag, argv: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments after the dropped flag's own. Raises ConfigError if that flag is refused."""
    if row.verdict is not FlagVerdict.NO_EFFECT:
        raise ConfigError(f"{group.flag} is refused: {row.why or 'this command does not support it'}")
    values, rest = _values(group, row)
    if row.arity is Arity.ONE and not values:
        raise ConfigError(f"{group.flag} has no value")
    for value in values:
        if row.name == "--tokenizer" and value not in (*_models(argv), "None"):
            raise ConfigError(f"{group.flag} {value} is refused: {row.why}")
        if not row.accepts_value(value):
            raise ConfigError(f"{group.flag} {value} is refused: {row.why}; accepted: {', '.join(row.only)}")
    return rest


def _values(group: _Group, row: VllmFlag) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the flag's own values and the arguments after them."""
    if group.inline is not None:
        return (group.inline,), group.words
    words = group.words
    count = {Arity.NOTHING: 0, Arity.ONE: 1, Arity.MAYBE: 1, Arity.MANY: len(words)}[row.arity]
    if row.arity is Arity.MAYBE and not (words and words[0].lower() in _BOOLEANS):
        count = 0
    return words[:count], words[count:]


def _models(argv: Sequence[str]) -> Iterator[str]:
    """Yield what the command line may name as its model: --model's value, and the first positional argument."""
    for group in _groups(argv):
        if group.flag == "--model" and group.inline is not None:
            yield group.inline
        elif group.flag in ("--model", ""):
            yield from group.words[:1]


def _pass_unknown(group: _Group, known: Collection[str]) -> tuple[str, ...]:
    """Return a short flag as typed, for argparse to check. Raises ConfigError for a long one."""
    if group.flag.startswith("--"):
        raise ConfigError(f"unknown flag {group.flag}{nearest(group.flag, known)}")
    return group.typed
