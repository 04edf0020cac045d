"""A vision tower as arithmetic: the values of an image are its file's bytes. Implements Encoding."""

import threading
from collections.abc import Callable

from engine.vision.encoded_image import EncodedImage
from images.token_count import ImageTokens
from wire.errors import InvalidRequest

BROKEN = b"broken"
"""The file that cannot be decoded."""


class FakeEncoding:
    """Encodes each file to `count` tokens; with `holds`, each file waits until `go` lets it be encoded."""

    def __init__(self, count: int, *, holds: bool = False, on_start: Callable[[], object] = lambda: None) -> None:
        self._count, self._on_start = count, on_start
        self._turns = threading.Semaphore(0) if holds else None
        self.tower_bytes = 1
        self.encoded: list[bytes] = []
        self.begun = threading.Semaphore(0)  # released for each file that is begun
        self.is_closed = False

    def go(self, times: int = 1) -> None:
        """Let this many waiting or later files be encoded."""
        assert self._turns is not None
        self._turns.release(times)

    def start(self) -> None:
        """Call `on_start`."""
        self._on_start()

    def encode(self, data: bytes) -> EncodedImage:
        """Return the file as values. Raises InvalidRequest for BROKEN."""
        self.encoded.append(data)
        self.begun.release()
        if self._turns is not None:
            self._turns.acquire(timeout=60)
        if data == BROKEN:
            raise InvalidRequest("the image file is broken")
        return EncodedImage(ImageTokens(self._count, (1, 1, self._count)), data)

    def close(self) -> None:
        """Record the call."""
        self.is_closed = True
