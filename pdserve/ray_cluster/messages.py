"""Messages between driver and node, validated on receipt. They are text: Ray never pickles our objects."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

from wire.errors import InternalError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """What an instance needs from a node; `device_ids` are its devices if Ray assigns none there."""

    kind: str
    device_ids: tuple[str, ...]
    version: str


@dataclass(frozen=True, slots=True)
class Placement:
    """Where an instance can run: its node, that node's address, a free port, its devices and their addresses."""

    node_id: str
    ip: str
    port: int
    device_ids: tuple[str, ...]
    device_ips: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """What to run on the node: flags, the files it reads, and the base folder of relative paths."""

    name: str
    role: str
    flags: tuple[str, ...]
    global_name: str
    global_table: str
    local_name: str
    local_table: str
    secret: str
    folder: str


@dataclass(frozen=True, slots=True)
class PollRequest:
    """A poll by the driver: the log offset to read from, and the global table if it has changed."""

    offset: int
    global_table: str | None


@dataclass(frozen=True, slots=True)
class PollReply:
    """The process's status: `log` is its output from the requested offset, `offset` the next one, `more` whether more
    is available; `exit_status` is None while it runs, negative for a signal.
    """

    pid: int
    log: str
    offset: int
    more: bool
    exit_status: int | None


@dataclass(frozen=True, slots=True)
class RemoteFailure:
    """An error: the name of a leaf of the error tree, and its message."""

    error: str
    message: str


def encode(message: Any) -> str:
    """Serialize a message."""
    return json.dumps(dataclasses.asdict(message))


def decode(kind: type[T], text: str) -> T:
    """Parse a message of type `kind`. Raises InternalError for any other text."""
    hints = get_type_hints(kind)
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise InternalError(f"{kind.__name__}: not JSON: {error}") from error
    if not isinstance(fields, dict) or set(fields) != set(hints):
        found = sorted(fields) if isinstance(fields, dict) else type(fields).__name__
        raise InternalError(f"{kind.__name__} has {found}, expected {sorted(hints)}")
    return kind(**{name: _check_type(f"{kind.__name__}.{name}", hints[name], value) for name, value in fields.items()})


def _check_type(what: str, hint: Any, value: object) -> object:
    if hint == tuple[str, ...] and isinstance(value, list) and all(isinstance(one, str) for one in value):
        return tuple(value)
    if hint == tuple[str, ...] or not isinstance(value, hint):
        raise InternalError(f"{what} is {value!r}, expected {hint}")
    return value
