"""What a dialect is: how it is told from others, how it is read, and how it is written."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ranktable_tools.document import Node
from ranktable_tools.reading import TableReading
from ranktable_tools.tables import Table

Document = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What some dialects do not say themselves.

    `num_prefill`: so many instances, from the first, are prefill and the others decode. `devices_per_instance`: where
    a dialect lists devices only.
    """

    num_prefill: int | None = None
    devices_per_instance: int | None = None


@dataclass(frozen=True, slots=True)
class Dialect:
    """One dialect; `write` returns a file's text or raises RanktableError where the dialect cannot say the table."""

    name: str
    says: str
    matches: Callable[[Document], bool]
    read: Callable[[Node, ReadOptions], TableReading]
    write: Callable[[Table], str] | None = None
    aliases: tuple[str, ...] = ()
