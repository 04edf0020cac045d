"""The sender's measurement of one link: round trips, then bytes over the transport that are written to no pool.

PING -> PONG  five times, one after another: the shortest counts
PROBE FRAME -> PROBED  at most four frames of 1 MiB in flight, so that tickets on the link continue between them

The receiver's half is probe_receiver.py.
"""

import secrets
import time
from collections import deque
from dataclasses import dataclass, field

from kvtransfer.device_memory import region_of
from kvtransfer.digest import RegionRuns
from kvtransfer.link_codec import encode
from kvtransfer.link_messages import Frame, MessageType, Signal
from kvtransfer.link_ops import LinkSettings, Measure, Measured, ProbeAnswered
from kvtransfer.mover import process_mover
from kvtransfer.outbox import Outbox
from kvtransfer.probe_receiver import PROBE_BYTES
from kvtransfer.slots import BlockWindow, SlotMap
from kvtransfer.transport_interface import Outlet
from wire.errors import DeadlineExceeded, InvalidRequest, PdserveError

MAX_MEASURE_BYTES = 256 << 20
_NUM_PINGS = 5
_MAX_FRAMES_IN_FLIGHT = 4


def check_num_bytes(num_bytes: int) -> None:
    """Raise InvalidRequest if the number of bytes is zero or over the limit."""
    if not 0 < num_bytes <= MAX_MEASURE_BYTES:
        raise InvalidRequest(f"num_bytes is {num_bytes}, but must be 1 to {MAX_MEASURE_BYTES}", "num_bytes")


@dataclass(slots=True)
class _Running:
    op: Measure
    bytes_left: int
    ticket_id: str = field(default_factory=lambda: secrets.token_hex(16))  # of the frames
    round_trips: list[float] = field(default_factory=list)
    ping_sent: tuple[int, float] = (0, 0.0)
    started: float | None = None
    bytes_sent: int = 0
    num_frames: int = 0
    in_flight: set[int] = field(default_factory=set)


class SpeedProbe:
    """Owner of the measurements of a connection, one at a time. Used by the link's writer thread only."""

    def __init__(
        self, settings: LinkSettings, outbox: Outbox, outlet: Outlet, receiver_epoch: int, *, digests: bool
    ) -> None:  # fmt: skip
        self._settings, self._outbox, self._outlet = settings, outbox, outlet
        self._receiver_epoch, self._digests = receiver_epoch, digests
        self._slots = SlotMap(settings.memory.layout, region_of(settings.memory))
        self._running: _Running | None = None
        self._waiting: deque[Measure] = deque()
        self._number = 0

    @property
    def idle(self) -> bool:
        """Whether no measurement is running or waiting."""
        return self._running is None

    def start(self, op: Measure) -> None:
        """Start a measurement, once those before it are done. Raises LinkLost."""
        self._waiting.append(op)
        self._start_next()

    def handle_answer(self, answer: ProbeAnswered) -> None:
        """Handle an answer of the receiver; one to an earlier measurement is ignored. Raises LinkLost."""
        running, number = self._running, answer.signal.number
        if running is None:
            return
        if answer.signal.kind is MessageType.PONG and number == running.ping_sent[0]:
            running.round_trips.append(answer.at - running.ping_sent[1])
            if len(running.round_trips) < _NUM_PINGS:
                self._ping(running)
            else:
                running.started = time.monotonic()
                self._send(running)
        elif answer.signal.kind is MessageType.PROBED and number in running.in_flight:
            running.in_flight.remove(number)
            self._send(running)
            if not running.in_flight:
                self._finish(running, answer.at)

    def check_deadline(self) -> None:
        """End the measurements whose deadline has passed. Raises LinkLost."""
        running, now = self._running, self._settings.clock()
        if running is not None and now > running.op.deadline:
            trips = f"{len(running.round_trips)} of {_NUM_PINGS} round trips"
            done = f"{trips} and {running.bytes_sent} of {running.op.num_bytes} bytes"
            self._running = None
            running.op.done(DeadlineExceeded(f"the measurement completed only {done} before its deadline"))
        late = [op for op in self._waiting if now > op.deadline]
        for op in late:
            self._waiting.remove(op)
            op.done(DeadlineExceeded("the link was still being measured for others at the deadline"))
        self._start_next()

    def fail(self, error: PdserveError) -> None:
        """End all measurements with an error."""
        ops = [*([] if self._running is None else [self._running.op]), *self._waiting]
        self._running = None
        self._waiting.clear()
        for op in ops:
            op.done(error)

    def _start_next(self) -> None:
        if self._running is None and self._waiting:
            op = self._waiting.popleft()
            self._running = running = _Running(op, op.num_bytes)
            self._ping(running)

    def _finish(self, running: _Running, ended: float) -> None:
        self._running = None
        seconds = ended - (ended if running.started is None else running.started)
        bytes_per_s = running.bytes_sent / seconds if seconds > 0 else 0.0
        running.op.done(Measured(min(running.round_trips), bytes_per_s))
        self._start_next()

    def _ping(self, running: _Running) -> None:
        self._number += 1
        self._outbox.flush()
        running.ping_sent = self._number, time.monotonic()
        self._outbox.add([encode(Signal(MessageType.PING, self._number))])
        self._outbox.flush()

    def _send(self, running: _Running) -> None:
        while running.bytes_left > 0 and len(running.in_flight) < _MAX_FRAMES_IN_FLIGHT:
            self._number += 1
            frame, source = self._frame(running)
            running.in_flight.add(self._number)
            running.bytes_left -= frame.num_bytes
            running.bytes_sent += frame.num_bytes
            running.num_frames += 1
            head: list[memoryview | bytes] = [encode(Signal(MessageType.PROBE, self._number))]
            self._outbox.add(head + self._outlet.announce(frame, source), frame.num_bytes)
        self._outbox.flush()

    def _frame(self, running: _Running) -> tuple[Frame, RegionRuns]:
        """Return the next frame and its source: blocks of each tensor in turn, whatever their contents."""
        layout, number = self._slots.layout, running.num_frames
        tensor = number % len(layout.tensors)
        spec = layout.tensors[tensor]
        room = min(layout.num_blocks * layout.block_size, max(1, PROBE_BYTES // spec.token_bytes))
        num_tokens = min(room, -(-running.bytes_left // spec.token_bytes))
        num_blocks = layout.num_blocks_for(num_tokens)
        first = number // len(layout.tensors) * num_blocks % (layout.num_blocks - num_blocks + 1)
        window = BlockWindow(tuple(range(first, first + num_blocks)), 0, num_tokens)
        source = self._slots.place(tensor, window)
        frame = Frame(
            running.ticket_id, self._receiver_epoch, number, spec.layer, tensor, 0, num_tokens,
            *layout.heads[tensor], num_tokens * spec.token_bytes,
            process_mover().digest(source) if self._digests else 0, window.block_ids,
        )  # fmt: skip
        return frame, source
