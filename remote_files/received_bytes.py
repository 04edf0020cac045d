"""A downloaded file in memory."""

from collections.abc import Callable


class ReceivedBytes:
    """Collects the bytes of one download; `before_each(num_bytes)` may refuse to hold more by raising."""

    def __init__(self, before_each: Callable[[int], None]) -> None:
        self._before_each = before_each
        self._received = bytearray()

    @property
    def content(self) -> bytes:
        """The bytes so far."""
        return bytes(self._received)

    def restart(self) -> None:
        """Drop everything."""
        self._received.clear()

    def write(self, piece: bytes) -> None:
        """Append these bytes."""
        self._before_each(len(piece))
        self._received += piece

    def keep(self) -> None:
        """Do nothing: complete bytes need no other place."""
