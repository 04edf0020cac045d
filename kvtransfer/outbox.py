"""Batches the small pieces sent on one stream."""

from collections.abc import Callable, Sequence

from kvtransfer.stream import Stream

_BATCH_BYTES = 1 << 20
_BATCH_PIECES = 512


class Outbox:
    """Owner of the pieces not yet sent. Used by the link's writer thread only."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._pieces: list[memoryview | bytes] = []
        self._num_bytes = 0
        self._progressed: Callable[[], None] | None = None
        self.batch = 0  # number of the batch that is queued or being sent

    def watch(self, progressed: Callable[[], None]) -> None:
        """Have `progressed` called whenever bytes are sent after a wait."""
        self._progressed = progressed

    def add(self, pieces: Sequence[memoryview | bytes], kv_bytes: int = 0) -> None:
        """Queue pieces that announce `kv_bytes`; a full batch is sent at once. Raises LinkLost."""
        self._pieces += pieces
        self._num_bytes += kv_bytes
        if self._num_bytes >= _BATCH_BYTES or len(self._pieces) >= _BATCH_PIECES:
            self.flush()

    def flush(self) -> None:
        """Send the queued pieces. Raises LinkLost."""
        if self._pieces:
            pieces, self._pieces, self._num_bytes = self._pieces, [], 0
            self._stream.send(pieces, self._progressed)
            self.batch += 1
