"""An instance's link reports: the figures in its load, and on request one link measurement at a time."""

import threading
from collections.abc import Sequence
from typing import Protocol

from kvtransfer.interface import Receiver, Sender
from kvtransfer.receiver_counts import ReceiverCounts
from telemetry.logs import EventLogger
from wire.errors import Overloaded, PdserveError
from wire.event_sink import EventSink
from wire.load import LinkStatus, LoadSnapshot
from wire.messages import LinkMeasured, MeasureLink
from wire.types import KvEndpoint

_log = EventLogger("instance")

MEASURE_TIMEOUT_S = 10.0
TURN_TIMEOUT_S = 30.0  # the sum of both limits is less than the time that a scheduler waits for the answer


class LinkedSender(Sender, Protocol):
    """The sender as the instance host uses it."""

    @property
    def frames_resent(self) -> int:
        """Frames that were sent a second time."""
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
    """Owner of the measurements: one at a time, each on a thread of its own, as it waits for a peer.

    A session's second measurement is refused until its first has ended; another session's measurement waits its turn.
    """

    def __init__(self) -> None:
        self._lock, self._turn = threading.Lock(), threading.Lock()
        self._askers = set[EventSink]()

    def measure(self, sender: LinkedSender, command: MeasureLink, asker: EventSink) -> None:
        """Emit the measured link, or an error, to the requesting session, within a time limit. Returns at once."""
        with self._lock:
            is_busy = asker in self._askers
            self._askers.add(asker)
        if is_busy:
            _refuse(command, asker, "this instance is already measuring a link; it measures one at a time")
            return
        thread = threading.Thread(target=self._run, args=(sender, command, asker), name="kv-measure", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._forget(asker)
            _refuse(command, asker, f"no thread to measure with: {error}")

    def _run(self, sender: LinkedSender, command: MeasureLink, asker: EventSink) -> None:
        try:
            answer = LinkMeasured(command.peer_id, self._measure(sender, command))
        except PdserveError as error:
            answer = LinkMeasured(command.peer_id, None, str(error))
        except Exception as error:  # noqa: BLE001  the outermost frame of this thread: the command must be answered
            _log.error("link_measure_failed", error, peer=command.peer_id, error=error)
            answer = LinkMeasured(command.peer_id, None, f"the measurement failed: {error}; see the instance's log")
        self._forget(asker)  # first: after the answer the scheduler may request the next one
        asker.emit(answer)

    def _measure(self, sender: LinkedSender, command: MeasureLink) -> LinkStatus:
        if not self._turn.acquire(timeout=TURN_TIMEOUT_S):
            raise Overloaded(f"other schedulers' measurements took {TURN_TIMEOUT_S:g} s; only one runs at a time")
        try:
            return sender.measure(
                command.peer_id, command.epoch, command.endpoints, command.num_bytes, MEASURE_TIMEOUT_S
            )
        finally:
            self._turn.release()

    def _forget(self, asker: EventSink) -> None:
        with self._lock:
            self._askers.discard(asker)


def _refuse(command: MeasureLink, asker: EventSink, why: str) -> None:
    asker.emit(LinkMeasured(command.peer_id, None, why))
