"""What driver and node tell each other, as text: Ray carries strings, never objects of ours. Read with checks."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

from wire.errors import InternalError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """What an instance needs of a node; `device_ids` are its devices where the node's Ray names none."""

    kind: str
    device_ids: tuple[str, ...]
    version: str


@dataclass(frozen=True, slots=True)
class Seat:
    """Where an instance can run: its node, that node's address, a free port, its devices and their addresses."""

    node_id: str
    ip: str
    port: int
    device_ids: tuple[str, ...]
    device_ips: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Orders:
    """What to run there: the command line's flags, the files it reads, and the folder relative paths start from."""

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
class Look:
    """What the driver asks, the log from which byte on, and says with it: the global table, where it is new."""

    offset: int
    global_table: str | None


@dataclass(frozen=True, slots=True)
class News:
    """How the process is: `log` is what it said since the byte asked for, `offset` the next one, `more` whether more is
    there already; `exit_status` is None while it runs, a signal's number below 0.
    """

    pid: int
    log: str
    offset: int
    more: bool
    exit_status: int | None


@dataclass(frozen=True, slots=True)
class RemoteFailure:
    """What went wrong: a leaf of our error tree, and its words."""

    error: str
    words: str


def encode(message: Any) -> str:
    """Return a message as text."""
    return json.dumps(dataclasses.asdict(message))


def decode(kind: type[T], text: str) -> T:
    """Return a message of one kind. Raises InternalError where the text is another one."""
    hints = get_type_hints(kind)
    try:
        told = json.loads(text)
    except ValueError as error:
        raise InternalError(f"{kind.__name__}: not JSON: {error}") from error
    if not isinstance(told, dict) or set(told) != set(hints):
        found = sorted(told) if isinstance(told, dict) else type(told).__name__
        raise InternalError(f"{kind.__name__} has {found}, expected {sorted(hints)}")
    return kind(**{name: _checked(f"{kind.__name__}.{name}", hints[name], value) for name, value in told.items()})


def _checked(what: str, hint: Any, value: object) -> object:
    if hint == tuple[str, ...] and isinstance(value, list) and all(isinstance(one, str) for one in value):
        return tuple(value)
    if hint == tuple[str, ...] or not isinstance(value, hint):
        raise InternalError(f"{what} is {value!r}, expected {hint}")
    return value
