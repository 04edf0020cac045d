"""The receiver's half of a measurement: PING is answered at once, a probe's payload goes where nobody reads it."""

from typing import TypeGuard

from kvtransfer.digest import Region, RegionRuns, StopFlag
from kvtransfer.frame import Frame, MessageType, Signal, TicketMessage, WireError, encode
from kvtransfer.staging import whole
from kvtransfer.stream import Stream
from kvtransfer.transport import Inlet
from wire.errors import HandoffFailed

PROBE_BYTES = 1 << 20  # of one frame at most


class Probed:
    """Owner of one connection's scratch memory, 1 MiB from its first probe on. Used by its receiving thread only."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._scratch: Region | None = None
        self._never = StopFlag()
        self._awaited: int | None = None

    def hear(self, signal: Signal) -> None:
        """Take PING, which is answered at once, or PROBE, whose frame comes next. Raises WireError."""
        if self._awaited is not None:
            raise WireError(f"{signal.kind.name} came where the FRAME of probe {self._awaited} was due")
        if signal.kind is MessageType.PING:
            self._answer(MessageType.PONG, signal.number)
        else:
            self._awaited = signal.number

    def takes(self, message: TicketMessage) -> TypeGuard[Frame]:
        """Whether `message` is the frame of a probe. Raises WireError when that was due and something else came."""
        if self._awaited is None:
            return False
        if not isinstance(message, Frame):
            raise WireError(f"{type(message).__name__} came where the FRAME of probe {self._awaited} was due")
        return True

    def move(self, frame: Frame, inlet: Inlet) -> None:
        """Move the payload as any other's and answer. Raises LinkLost, WireError."""
        assert self._awaited is not None
        if frame.num_bytes > PROBE_BYTES:
            raise WireError(f"a probe of {frame.num_bytes} bytes, the limit is {PROBE_BYTES}")
        if frame.num_tensors != 1 or not 0 < frame.end - frame.start <= frame.num_bytes:
            raise WireError(
                f"a probe of {frame.num_tensors} tensors and {frame.end - frame.start} tokens, "
                f"the limit is 1 and one a byte of {frame.num_bytes}"
            )
        self._scratch = self._scratch or Region(bytearray(PROBE_BYTES))
        try:
            moved = inlet.move(frame, RegionRuns(self._scratch, 0, whole(frame.num_bytes)), self._never)
        except HandoffFailed as error:
            raise WireError(f"probe {self._awaited}: {error}") from error
        if moved is None:
            inlet.skip(frame)
        number, self._awaited = self._awaited, None
        self._answer(MessageType.PROBED, number)

    def _answer(self, kind: MessageType, number: int) -> None:
        self._stream.send_now(encode(Signal(kind, number)))
