"""Parse server-sent events from a byte stream (WHATWG HTML, section 9.2)."""

_MAX_BYTES = 64 << 20


class EventReader:
    """Returns the data of each event once it is complete. Owns the incomplete one."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._rest, self._max_bytes = b"", max_bytes
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the data of the events that end in `chunk`. Raises ValueError for one that is too large."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
        held = len(self._rest) + sum(map(len, self._data))
        if held > self._max_bytes:
            raise ValueError(f"an event has more than {self._max_bytes:,} bytes")
        return events
