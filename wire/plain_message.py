"""Convert a dataclass to a protobuf message and back by the plain fields that have the same name in both."""

from dataclasses import fields
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from google.protobuf.message import Message

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

D = TypeVar("D", bound="DataclassInstance")
M = TypeVar("M", bound=Message)

_PLAIN = (int, float, str, bool, bytes)
_OPTIONAL = tuple(kind | None for kind in _PLAIN)
_LISTS = (tuple[int, ...], tuple[str, ...])


class PlainMessage(Generic[D, M]):
    """The plain fields of a dataclass: numbers, texts, bytes and lists of numbers or texts; None means not set.

    Fields of other types, converted, are arguments of both methods.
    """

    def __init__(self, kind: type[D], message: type[M], *, not_sent: tuple[str, ...] = ()) -> None:
        """`not_sent` names fields with a default that the message lacks."""
        self._kind, self._message = kind, message
        sent = [field for field in fields(kind) if field.name not in not_sent]
        self._plain, self._optional, self._lists = (
            tuple(field.name for field in sent if field.type in types) for types in (_PLAIN, _OPTIONAL, _LISTS)
        )
        self._implicit = (*self._plain, *self._lists)

    def to_pb(self, value: D, **others: Any) -> M:
        """Convert a value. A zero or an empty text or list is not written: it is what an absent field means."""
        sent = {name: found for name in self._implicit if (found := getattr(value, name))}
        sent |= {name: found for name in self._optional if (found := getattr(value, name)) is not None}
        return self._message(**sent, **others)

    def from_pb(self, message: M, **others: Any) -> D:
        """Convert a message."""
        values = {name: getattr(message, name) for name in self._plain}
        values |= {name: getattr(message, name) if message.HasField(name) else None for name in self._optional}
        values |= {name: tuple(getattr(message, name)) for name in self._lists}
        return self._kind(**values, **others)
