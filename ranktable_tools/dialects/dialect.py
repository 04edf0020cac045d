"""The definition of a dialect: how it is detected, read and written."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ranktable_tools.document import Node
from ranktable_tools.reading import TableReading
from ranktable_tools.tables import Table

Document = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Facts that some dialects do not contain.

    The first `num_prefill` instances are prefill, the others decode. In a dialect that lists only devices, every
    `devices_per_instance` of them are one instance.
    """

    num_prefill: int | None = None
    devices_per_instance: int | None = None


@dataclass(frozen=True, slots=True)
class Dialect:
    """One dialect; `write` returns a file's text, or raises RanktableError if it cannot represent the table."""

    name: str
    description: str
    matches: Callable[[Document], bool]
    read: Callable[[Node, ReadOptions], TableReading]
    write: Callable[[Table], str] | None = None
    aliases: tuple[str, ...] = ()
