"""What a transport is on each side, with receiver-reads meaning: only the receiver writes its pool."""

from collections.abc import Callable, Sequence
from typing import Protocol

from kvtransfer.frame import Frame
from kvtransfer.hello import Hello
from kvtransfer.stream import Stream
from wire.types import KvEndpoint


class Outlet(Protocol):
    """The sender's side of one transport."""

    @property
    def name(self) -> str: ...

    def reaches(self, endpoint: KvEndpoint) -> bool:
        """Tell whether this transport can be tried there."""
        ...

    def connect(self, endpoint: KvEndpoint, *, timeout_s: float, progress_timeout_s: float) -> Stream:
        """Connect and send what must come before HELLO. Raises OSError, LinkLost."""
        ...

    def announce(self, frame: Frame, pieces: Sequence[memoryview]) -> list[memoryview | bytes]:
        """Return what goes out for a frame whose payload is `pieces` of the sender's pool."""
        ...


class Inlet(Protocol):
    """The receiver's side of one accepted connection."""

    def greet(self) -> None:
        """Take what comes before HELLO. Raises LinkLost, WireError."""
        ...

    def admit(self, hello: Hello) -> None:
        """Prepare for this sender. Raises Unavailable when this transport cannot serve it, others may."""
        ...

    def move(self, frame: Frame, targets: Sequence[memoryview], stopped: Callable[[], bool]) -> int | None:
        """Move the payload into `targets` and return its digest; None when `stopped` cut it short.

        Raises LinkLost, and HandoffFailed when the frame cannot be read from where it says.
        """
        ...

    def skip(self, frame: Frame) -> None:
        """Get past what is left of the frame's payload without keeping it. Raises LinkLost, WireError."""
        ...

    def close(self) -> None:
        """Release what `greet` and `admit` took."""
        ...
