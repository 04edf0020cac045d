"""Read `--config cluster.yaml`: one flat mapping of flags, each with its line number.

Only events of the YAML parser are read and no object is constructed: tags, aliases and nesting, which could expand to
more than the file shows, are refused.
"""

import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from wire.errors import ConfigError

MAX_BYTES = 64 * 2**10
_OWN_PIPES = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
_SCALAR_TAGS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool"))
_TRUE, _FALSE, _NULL = ("true", "yes", "on"), ("false", "no", "off"), ("", "~", "null")


@dataclass(frozen=True, slots=True)
class Value:
    """One value as written; `plain` is False for a quoted one."""

    text: str
    plain: bool

    @property
    def boolean(self) -> bool | None:
        """The value as a boolean, None if it is not one."""
        word = self.text.lower() if self.plain else ""
        return True if word in _TRUE else False if word in _FALSE else None


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of the file; `place` is `PATH:LINE`, for messages."""

    key: str
    values: tuple[Value, ...]
    is_list: bool
    place: str

    @property
    def flag(self) -> str:
        """The key as a flag."""
        return "--" + self.key.replace("_", "-")


def read(path: str) -> tuple[Entry, ...]:
    """Return the entries of a file, in order. Raises ConfigError with the path, and the line where there is one."""
    entries = tuple(_Reader(path, _text(path)).entries())
    first: dict[str, Entry] = {}
    for entry in entries:
        if first.setdefault(entry.flag, entry) is not entry:
            before = first[entry.flag].place.rpartition(":")[2]
            raise ConfigError(f"{entry.place}: {entry.key} is already on line {before}")
    return entries


def _text(path: str) -> str:
    try:
        _refuse_blocking(path)
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"--config {path} has more than {MAX_BYTES} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path} is not UTF-8 at byte {error.start}") from error


def _refuse_blocking(path: str) -> None:
    """Raise ConfigError for a device or a pipe, which may block on open, unless it is a shell's <(...)."""
    mode = Path(path).stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or path.startswith(_OWN_PIPES)):
        raise ConfigError(f"--config {path} is not a regular file: use a YAML file, or /dev/stdin for a pipe")


class _Reader:
    """Walks the events of one document. Raises ConfigError at the first that does not belong to a flat mapping."""

    def __init__(self, path: str, text: str) -> None:
        self._path = path
        self._events = self._parse_events(text)

    def entries(self) -> Iterator[Entry]:
        """Yield each key with its values; an empty file has none."""
        event = self._next()
        if isinstance(event, yaml.StreamEndEvent):
            return
        if isinstance(event, yaml.ScalarEvent) and event.implicit[0] and event.value in _NULL:
            return
        if not isinstance(event, yaml.MappingStartEvent):
            raise self._error(event, "the file must be a mapping, such as `model: /models/Qwen3-0.6B`")
        while not isinstance(event := self._next(), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                raise self._error(event, "a key must be the name of a flag")
            yield self._entry(event)
        self._end()

    def _entry(self, key: yaml.ScalarEvent) -> Entry:
        place = f"{self._path}:{_line(key)}"
        event = self._next()
        if not isinstance(event, yaml.SequenceStartEvent):
            return Entry(key.value, (self._value(key.value, event),), is_list=False, place=place)
        self._refuse_tag(key.value, event)
        values = []
        while not isinstance(event := self._next(), yaml.SequenceEndEvent):
            values.append(self._value(key.value, event))
        if not values:
            raise self._error(event, f"{key.value} is an empty list")
        return Entry(key.value, tuple(values), is_list=True, place=place)

    def _value(self, key: str, event: yaml.Event) -> Value:
        if not isinstance(event, yaml.ScalarEvent):
            raise self._error(event, f"{key} must be a value or a list of values, nothing nested")
        self._refuse_tag(key, event)
        plain = event.style is None
        if plain and event.value.lower() in _NULL:
            raise self._error(event, f"{key} has no value: leave the line out")
        return Value(event.value, plain)

    def _refuse_tag(self, key: str, event: yaml.ScalarEvent | yaml.SequenceStartEvent) -> None:
        if event.tag is not None and event.tag not in _SCALAR_TAGS:
            raise self._error(event, f"{key} has the tag {event.tag[:80]!r}: write the value alone")

    def _end(self) -> None:
        event = self._next()
        if not isinstance(event, yaml.StreamEndEvent):
            raise self._error(event, "the file must be a single YAML document")

    def _next(self) -> yaml.Event:
        for event in self._events:
            if isinstance(event, yaml.AliasEvent):
                raise self._error(event, f"*{str(event.anchor)[:80]} is an alias: write the value out")
            if not isinstance(event, (yaml.StreamStartEvent, yaml.DocumentStartEvent, yaml.DocumentEndEvent)):
                return event
        raise ConfigError(f"--config {self._path} ends too early")

    def _parse_events(self, text: str) -> Iterator[yaml.Event]:
        try:
            yield from yaml.parse(text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = f":{mark.line + 1}" if mark else ""
            raise ConfigError(f"{self._path}{line}: invalid YAML: {error.problem}") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{self._path}: invalid YAML: {' '.join(str(error).split())}") from error

    def _error(self, event: yaml.Event, problem: str) -> ConfigError:
        return ConfigError(f"{self._path}:{_line(event)}: {problem}")


def _line(event: yaml.Event) -> int:
    assert event.start_mark is not None, "the parser marks every event"
    return event.start_mark.line + 1
