"""The two ends of one link over a group: headers are sent on the stream, each frame's payload as one operation.

Every announced frame is received once and in order; one that is not needed is received into staging and dropped.
"""

import contextlib
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from kvtransfer.digest import RegionRuns, StopFlag
from kvtransfer.link_codec import MAX_FRAME_BYTES, WireError, encode
from kvtransfer.link_messages import Frame, Taken
from kvtransfer.ring import Ring
from kvtransfer.stream import LinkLost, Stream
from native.ticker import run_time
from wire.errors import HandoffFailed

if TYPE_CHECKING:
    from kvtransfer.process_group.payload import GroupStaging

MAX_PAYLOAD_BYTES = 4 << 20
# The outbox may still hold the headers of up to a batch of frames (1 MiB, 512 headers), and a payload is received only
# after its header. So space for three of the largest frames and twice as many headers always has room for one more.
OUTLET_BYTES = 3 * MAX_PAYLOAD_BYTES
_MAX_UNDER_WAY = 1_024
_POLL_S = 0.1
_LINGER_S = 1.0
_NEVER = StopFlag()


class LinkGroup(Protocol):
    """The group of one link: in this process (group.py), or in a process of its own (remote_group.py)."""

    def send(self, tensor: Any) -> "Future[None]":
        """Send a part of the staging; the future completes when it may be reused, with LinkLost if the group failed."""
        ...

    def receive(self, staging: "GroupStaging", num_bytes: int) -> "Future[None]":
        """Receive the peer's next tensor at the start of `staging`; the future is like that of `send`."""
        ...

    def close(self) -> None:
        """Free the group, or abandon it; idempotent."""
        ...


class GroupOutlet:
    """The sender's end: gathers pieces into staging and issues them, without waiting for earlier frames."""

    max_frame_bytes = MAX_PAYLOAD_BYTES

    def __init__(self, group: LinkGroup, staging: "GroupStaging", stream: Stream, progress_s: float) -> None:
        self._group, self._staging, self._waiter = group, staging, _Waiter(stream, progress_s)
        self._ring = Ring(OUTLET_BYTES)
        self._under_way: deque[Future[None]] = deque()

    def announce(self, frame: Frame, source: RegionRuns) -> list[memoryview | bytes]:
        """Return the header alone; the payload is being sent already. Waits for space."""
        num_bytes = source.runs.num_bytes
        if num_bytes > MAX_PAYLOAD_BYTES:
            raise HandoffFailed(f"frame {frame.number} has {num_bytes} bytes, but the limit is {MAX_PAYLOAD_BYTES}")
        start = self._wait_for_room(num_bytes)
        self._staging.gather(start, source)
        self._under_way.append(self._group.send(self._staging.tensor(start, num_bytes)))
        return [encode(replace(frame, block_ids=()))]

    def taken(self, message: Taken) -> None:
        """Do nothing: the receiver does not use the sender's memory."""

    def close(self) -> None:
        """Let the peer receive what was announced, for a short time; then free or abandon the group."""
        deadline = time.monotonic() + _LINGER_S
        with contextlib.suppress(LinkLost, TimeoutError):
            while self._under_way:
                self._under_way[0].result(max(0.0, deadline - time.monotonic()))
                self._under_way.popleft()
        self._group.close()

    def _wait_for_room(self, num_bytes: int) -> int:
        while self._under_way and self._under_way[0].done():
            self._free_oldest()
        while len(self._under_way) >= _MAX_UNDER_WAY or (start := self._ring.take(num_bytes)) is None:
            self._waiter.wait(self._under_way[0], _NEVER)
            self._free_oldest()
        return start

    def _free_oldest(self) -> None:
        self._under_way.popleft().result()
        self._ring.give_back()


class GroupInlet:
    """The receiver's end: receives a frame into staging, then copies it to the slots with its digest."""

    def __init__(
        self, group: LinkGroup, staging: "GroupStaging", stream: Stream, progress_s: float, *, digests: bool
    ) -> None:
        self._group, self._staging, self._waiter = group, staging, _Waiter(stream, progress_s)
        self._digests = digests
        self._arriving: Future[None] | None = None
        self._here = False

    def move(self, frame: Frame, target: RegionRuns, stop: StopFlag) -> int | None:
        """Receive the frame, then copy it to the target."""
        if frame.num_bytes > MAX_PAYLOAD_BYTES:
            raise HandoffFailed(
                f"frame {frame.number} has {frame.num_bytes} bytes, but the limit is {MAX_PAYLOAD_BYTES}"
            )
        if target.runs.num_bytes != frame.num_bytes:
            raise HandoffFailed(
                f"frame {frame.number} has {frame.num_bytes} bytes, but its slots have {target.runs.num_bytes}"
            )
        self._arriving = self._group.receive(self._staging, frame.num_bytes)
        if not self._waiter.wait(self._arriving, stop):
            return None
        self._arriving, self._here = None, True
        digest = self._staging.scatter(0, target, stop, digests=self._digests)
        if digest is not None:
            self._here = False
        return digest

    def skip(self, frame: Frame) -> None:
        """Receive the rest of the frame and drop it; a payload over the limit ends the connection."""
        if self._here:
            self._here = False
            return
        if frame.num_bytes > min(MAX_PAYLOAD_BYTES, MAX_FRAME_BYTES):
            raise WireError(f"a FRAME has {frame.num_bytes} bytes, but the limit is {MAX_PAYLOAD_BYTES}")
        arriving = self._arriving or self._group.receive(self._staging, frame.num_bytes)
        self._arriving = None
        self._waiter.wait(arriving, _NEVER)

    def close(self) -> None:
        """Free or abandon the group."""
        self._group.close()


class _Waiter:
    """Waits for an operation, and meanwhile checks that the link's connection is open."""

    def __init__(self, stream: Stream, progress_s: float) -> None:
        self._stream, self._progress_s = stream, progress_s

    def wait(self, done: "Future[None]", stop: StopFlag) -> bool:
        """Wait for `done`; return False soon after `stop` is set. Raises LinkLost."""
        deadline = run_time() + 2 * self._progress_s  # the group's own deadline is earlier
        while True:
            try:
                done.result(_POLL_S)
                return True
            except TimeoutError:
                if stop.is_set():
                    return False
                if self._stream.is_hung_up:
                    raise LinkLost("the connection was closed in the middle of a frame") from None
                if run_time() > deadline:
                    raise LinkLost(f"no data was transferred for {2 * self._progress_s:g} s") from None
