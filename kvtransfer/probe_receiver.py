"""The receiver's half of a measurement: answers PING at once, and reads probe payloads into scratch memory."""

from collections.abc import Callable
from typing import TypeGuard

from kvtransfer.digest import Region, RegionRuns, StopFlag
from kvtransfer.link_codec import WireError, encode
from kvtransfer.link_messages import Frame, MessageType, Signal, TicketMessage
from kvtransfer.staging import whole
from kvtransfer.stream import Stream
from kvtransfer.transport_interface import Inlet
from wire.errors import HandoffFailed

PROBE_BYTES = 1 << 20  # the limit for one frame


class ProbeReceiver:
    """Owner of one connection's scratch memory, 1 MiB from the first probe on. Used by its receiving thread only.

    `make_scratch` returns memory of the kind of the receiver's pool, so that a probe is moved as KV is.
    """

    def __init__(self, stream: Stream, make_scratch: Callable[[int], Region]) -> None:
        self._stream, self._make_scratch = stream, make_scratch
        self._scratch: Region | None = None
        self._never = StopFlag()
        self._expected: int | None = None

    def handle(self, signal: Signal) -> None:
        """Answer a PING at once, or record a PROBE, whose frame must come next. Raises WireError."""
        if self._expected is not None:
            raise WireError(f"received {signal.kind.name}, expected the FRAME of probe {self._expected}")
        if signal.kind is MessageType.PING:
            self._answer(MessageType.PONG, signal.number)
        else:
            self._expected = signal.number

    def is_probe_frame(self, message: TicketMessage) -> TypeGuard[Frame]:
        """Return whether `message` is a probe's frame. Raises WireError if it is not, but one is expected."""
        if self._expected is None:
            return False
        if not isinstance(message, Frame):
            raise WireError(f"received {type(message).__name__}, expected the FRAME of probe {self._expected}")
        return True

    def move(self, frame: Frame, inlet: Inlet) -> None:
        """Move the payload like any other, and answer. Raises LinkLost, WireError."""
        assert self._expected is not None
        if frame.num_bytes > PROBE_BYTES:
            raise WireError(f"a probe has {frame.num_bytes} bytes, but the limit is {PROBE_BYTES}")
        if frame.num_tensors != 1 or not 0 < frame.end - frame.start <= frame.num_bytes:
            raise WireError(
                f"a probe has num_tensors {frame.num_tensors} and num_tokens {frame.end - frame.start}, "
                f"but must have 1 and 1 to {frame.num_bytes}, its number of bytes"
            )
        self._scratch = self._scratch or self._make_scratch(PROBE_BYTES)
        try:
            moved = inlet.move(frame, RegionRuns(self._scratch, 0, whole(frame.num_bytes)), self._never)
        except HandoffFailed as error:
            raise WireError(f"probe {self._expected}: {error}") from error
        if moved is None:
            inlet.skip(frame)
        number, self._expected = self._expected, None
        self._answer(MessageType.PROBED, number)

    def _answer(self, kind: MessageType, number: int) -> None:
        self._stream.send_now(encode(Signal(kind, number)))
