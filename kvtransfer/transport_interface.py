"""The transport interface. Only the receiver writes its pool: it reads or receives the payload of each frame.

    sender    unreachable -> connect -> [HELLO ... WELCOME] -> outlet -> [READY] -> announce ... -> close
    receiver                 (accept)   [HELLO ... WELCOME] -> inlet  -> [READY] -> move | skip ... -> close

The messages are sent over one `Stream` per link; the payload's path is specific to the transport.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from kvtransfer.digest import RegionRuns, StopFlag
from kvtransfer.hello import Hello
from kvtransfer.link_messages import Frame, Taken
from kvtransfer.stream import Stream
from wire.types import KvEndpoint

FRAME_BYTES = 4 << 20  # largest frame of transports that send or stage the payload


@dataclass(frozen=True, slots=True)
class TransportTraits:
    """How one transport differs from the others, on every machine; `Transport.unusable` is about this machine.

    `name` is the value of --kv-transport, and the label in messages and metrics. `max_links` is the number of links to
    one peer beyond which more are no faster. `one_host`: links use an abstract Unix socket, so they need no port and
    reach no other host or network namespace; all others use the instance's TCP listener. `by_default`: whether it is
    used without --kv-transport for a pool on this device, such as "cuda:0". `is_slow`: whether the set-up for such a
    pool may take longer than a ticket can wait, so that a quicker transport carries the tickets until it is done.
    `reads_pool`: the receiver reads the sender's pool, some time after the announcement. `two_processes`: on a device,
    the two ends cannot be in one process. `through_host`: the KV of such a pool is copied through host memory at both
    ends. `same` is the trait of devices that must be equal at both ends. `measured_first`: where another transport
    works, this one carries tickets only once its link was measured and is faster than the one in use. `purpose`
    completes "NAME, which ..., ".
    """

    name: str
    max_links: int = 1
    one_host: bool = False
    by_default: Callable[[str], bool] = lambda _: True
    is_slow: Callable[[str], bool] = lambda _: False
    reads_pool: bool = False
    two_processes: bool = False
    through_host: Callable[[str], bool] = lambda _: False
    same: Literal["collective", "one_sided"] | None = None
    measured_first: bool = False
    purpose: str = ""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Time limits of a link: for connecting, and then for any progress of the peer.

    `step_s` is the time limit of a step, whose sums over ranks may wait on the device for an operation of the link.
    """

    connect_s: float = 2.0
    progress_s: float = 10.0
    step_s: float = math.inf

    @property
    def operation_s(self) -> float:
        """Time limit for one operation on a device: a link whose peer hangs ends before the step does (ADR 15)."""
        return min(self.progress_s, self.step_s / 2)


class Outlet(Protocol):
    """The sender's side of one connection. Used by the link's writer thread only, except `taken` and `close`."""

    @property
    def max_frame_bytes(self) -> int:
        """The largest frame allowed; larger frames cost less per byte, and more if one must be resent."""
        ...

    def announce(self, frame: Frame, source: RegionRuns) -> list[memoryview | bytes]:
        """Return what is sent on the stream for a frame whose payload is at `source` in the sender's pool.

        May wait for space, up to the progress timeout. Raises LinkLost.
        """
        ...

    def taken(self, message: Taken) -> None:
        """The receiver is done with a frame's payload, whose memory is free again. Called on the reader thread."""
        ...

    def close(self) -> None:
        """Release the resources of the set-up; idempotent.

        The receiver may still read memory that was shared with it: over `shm` and `cuda_ipc`, the sender's pool
        until the receiver unmaps it at the link's end; over `mooncake`, a ring with frames not yet taken, for 1 s.
        """
        ...


class Inlet(Protocol):
    """The receiver's side of one connection. Used by that connection's thread only."""

    def move(self, frame: Frame, target: RegionRuns, stop: StopFlag) -> int | None:
        """Move the payload to `target` and return its digest (0 without digests); None if `stop` interrupted it.

        Raises LinkLost, and HandoffFailed if the frame cannot be read from the place it names.
        """
        ...

    def skip(self, frame: Frame) -> None:
        """Read and discard the rest of the frame's payload. Raises LinkLost, WireError."""
        ...

    def close(self) -> None:
        """Release the resources of the set-up; idempotent."""
        ...


class Transport(Protocol):
    """One transport of one instance, for both of its halves. Thread-safe."""

    @property
    def traits(self) -> TransportTraits: ...

    def unusable(self) -> str | None:
        """Return why it cannot be offered, or None: what this machine or pool lacks."""
        ...

    def bind(self, host: str | None, source: str | None) -> None:
        """Set the addresses of this machine, each if known: `host` of the instance, `source` of its connections.

        A transport that will open further ports at `host` warns of them now.
        """
        ...

    def unreachable(self, endpoint: KvEndpoint) -> str | None:
        """Return why an endpoint of this transport cannot be reached from here, or None."""
        ...

    def connect(self, endpoint: KvEndpoint, timeouts: Timeouts) -> Stream:
        """Connect to the endpoint. Raises OSError, ValueError."""
        ...

    def outlet(self, stream: Stream, hello: Hello, timeouts: Timeouts) -> Outlet:
        """Run the sender's set-up after WELCOME, as the receiver runs `inlet`. Raises LinkLost, OSError, WireError."""
        ...

    def inlet(self, stream: Stream, hello: Hello, timeouts: Timeouts) -> Inlet:
        """Run the receiver's set-up after WELCOME, while the sender runs `outlet`.

        Raises LinkLost, WireError; Unavailable if this transport cannot serve this sender but others may.
        """
        ...
