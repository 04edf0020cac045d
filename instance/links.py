"""An instance's link reports: the figures in its load, and on request one link measurement at a time."""

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from kvtransfer.interface import Receiver, Sender
from kvtransfer.receiver_counts import ReceiverCounts
from telemetry.logs import EventLogger
from wire.errors import PdserveError
from wire.load import LinkStatus, LoadSnapshot
from wire.messages import LinkMeasured, MeasureLink
from wire.types import KvEndpoint

_log = EventLogger("instance")

MEASURE_TIMEOUT_S = 10.0


class LinkedSender(Sender, Protocol):
    """The sender as the instance host uses it."""

    @property
    def frames_resent(self) -> int:
        """Frames that went out a second time."""
        ...

    def measure(
        self, peer_id: str, epoch: int, endpoints: Sequence[KvEndpoint], num_bytes: int, timeout_s: float
    ) -> LinkStatus:
        """Measure the link to a peer, dialled if necessary. Blocks. Raises PdserveError with a message."""
        ...


class CountedReceiver(Receiver, Protocol):
    """The receiver as the instance host uses it."""

    @property
    def counts(self) -> ReceiverCounts:
        """Counts of what was received since the start."""
        ...


def add_links(load: LoadSnapshot, sender: LinkedSender, receiver: CountedReceiver) -> None:
    """Add the KV sender's and receiver's figures to `load`."""
    counts = receiver.counts
    load.kv_bytes_sent = sender.bytes_sent
    load.kv_bytes_received = counts.bytes_received
    load.kv_frames_corrupt = counts.corrupt_frames
    load.kv_frames_resent = sender.frames_resent
    load.kv_frames_dropped = counts.dropped_frames
    load.kv_frames_duplicate = counts.duplicate_frames
    load.kv_links_refused = counts.refused_connections
    load.links = sender.links()


class LinkMeasurer:
    """Owner of the one measurement in progress, on its own thread: it waits for a peer, which a session must not."""

    def __init__(self, emit: Callable[[LinkMeasured], None]) -> None:
        self._emit = emit
        self._busy = threading.Lock()

    def measure(self, sender: LinkedSender, command: MeasureLink) -> None:
        """Emit the measured link within a time limit, or an error if one is in progress. Returns at once."""
        if not self._busy.acquire(blocking=False):
            self._refuse(command, "this instance is already measuring a link; it measures one at a time")
            return
        thread = threading.Thread(target=self._run, args=(sender, command), name="kv-measure", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._busy.release()
            self._refuse(command, f"no thread to measure with: {error}")

    def _run(self, sender: LinkedSender, command: MeasureLink) -> None:
        try:
            answer = LinkMeasured(command.peer_id, self._measure(sender, command))
        except PdserveError as error:
            answer = LinkMeasured(command.peer_id, None, str(error))
        except Exception as error:  # noqa: BLE001  the outermost frame of this thread: the command must be answered
            _log.error("link_measure_failed", error, peer=command.peer_id, error=error)
            answer = LinkMeasured(command.peer_id, None, f"the measurement failed: {error}; see the instance's log")
        self._busy.release()  # first: after the answer the scheduler may request the next one
        self._emit(answer)

    def _measure(self, sender: LinkedSender, command: MeasureLink) -> LinkStatus:
        return sender.measure(
            command.peer_id, command.epoch, command.endpoints, command.num_bytes, MEASURE_TIMEOUT_S
        )  # fmt: skip

    def _refuse(self, command: MeasureLink, why: str) -> None:
        self._emit(LinkMeasured(command.peer_id, None, why))
