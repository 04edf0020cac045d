"""What a transport is, with receiver-reads meaning: only the receiver writes its pool.

    sender    unreachable -> connect -> [HELLO ... WELCOME] -> outlet -> [READY] -> announce ... -> close
    receiver                 (accept)   [HELLO ... WELCOME] -> inlet  -> [READY] -> move | skip ... -> close

The messages go over one `Stream` a link; how the bytes of a frame go is the transport's own.
"""

from dataclasses import dataclass
from typing import Protocol

from kvtransfer.digest import RegionRuns, StopFlag
from kvtransfer.frame import Frame, Taken
from kvtransfer.hello import Hello
from kvtransfer.stream import Stream
from wire.types import KvEndpoint

FRAME_BYTES = 4 << 20  # of the largest frame where the payload is sent or staged


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long a link waits: to connect, and for any progress of the peer afterwards."""

    connect_s: float = 2.0
    progress_s: float = 10.0


class Outlet(Protocol):
    """The sender's side of one connection. Used by the link's writer thread only, but for `taken` and `close`."""

    @property
    def most_frame_bytes(self) -> int:
        """The largest frame to be announced; larger ones cost less a byte, and more when one has to be sent again."""
        ...

    def announce(self, frame: Frame, source: RegionRuns) -> list[memoryview | bytes]:
        """Return what goes out on the stream for a frame whose payload lies at `source` in the sender's pool.

        May wait for room, up to the progress timeout. Raises LinkLost.
        """
        ...

    def taken(self, message: Taken) -> None:
        """The receiver is done with a frame's payload: what was lent for it is free. On the reader thread."""
        ...

    def close(self) -> None:
        """Release what the set-up took; idempotent.

        What the receiver was sent or lent before, it may still read: over `shm` and `cuda_ipc` the sender's pool until
        the receiver unmaps it, which it does at the link's end; over `mooncake` a ring with frames lent out for 1 s.
        """
        ...


class Inlet(Protocol):
    """The receiver's side of one connection. Used by that connection's thread only."""

    def move(self, frame: Frame, target: RegionRuns, stop: StopFlag) -> int | None:
        """Move the payload to `target` and return its digest, 0 on a link without; None when `stop` cut it short.

        Raises LinkLost, and HandoffFailed when the frame cannot be read from where it says.
        """
        ...

    def skip(self, frame: Frame) -> None:
        """Get past what is left of the frame's payload without keeping it. Raises LinkLost, WireError."""
        ...

    def close(self) -> None:
        """Release what the set-up took; idempotent."""
        ...


class Transport(Protocol):
    """One transport of one instance, for both of its halves. Thread-safe."""

    @property
    def name(self) -> str: ...

    @property
    def over_unix(self) -> bool:
        """Whether its links begin on a Unix socket; all others begin on the instance's TCP listener."""
        ...

    @property
    def lanes(self) -> int:
        """How many links to one peer at once are of use at most."""
        ...

    def unusable(self) -> str | None:
        """Why it cannot be offered here, in words, or None: what is missing on this machine or of this pool."""
        ...

    def unreachable(self, endpoint: KvEndpoint) -> str | None:
        """Why an endpoint of this transport is out of reach from here, in words, or None."""
        ...

    def connect(self, endpoint: KvEndpoint, timeouts: Timeouts) -> Stream:
        """Connect to where the link begins. Raises OSError, ValueError."""
        ...

    def outlet(self, stream: Stream, hello: Hello, timeouts: Timeouts) -> Outlet:
        """The sender's set-up after WELCOME, while the receiver is in `inlet`. Raises LinkLost, OSError, WireError."""
        ...

    def inlet(self, stream: Stream, hello: Hello, timeouts: Timeouts) -> Inlet:
        """The receiver's set-up after WELCOME, while the sender is in `outlet`.

        Raises LinkLost, WireError; Unavailable when this transport cannot serve this sender, others may.
        """
        ...
