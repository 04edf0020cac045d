"""Shows how far loading is, in bytes: a bar on a terminal, else a log line now and then."""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TextIO

from tqdm import tqdm

from telemetry.logs import EventLogger

log = EventLogger("engine")

_LINE_S = 2.0


class LoadProgress:
    """Owns the bar of one loading; `with` ends it."""

    def __init__(
        self, total_bytes: int, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`stream` is stderr as it is now: what it was at import may be closed."""
        self._total, self._done, self._clock = total_bytes, 0, clock
        stream = sys.stderr if stream is None else stream
        self._began = self._said = clock()
        self._bar: Any = None
        if stream.isatty():
            self._bar = tqdm(total=total_bytes, unit="B", unit_scale=True, desc="weights", file=stream, leave=False)

    def advance(self, num_bytes: int) -> None:
        """Count bytes more as loaded."""
        self._done += num_bytes
        if self._bar is not None:
            self._bar.update(num_bytes)
        elif self._clock() - self._said >= _LINE_S:
            self._said = self._clock()
            self._say()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        if error is None:
            self._say()

    def _say(self) -> None:
        log.info("weights_loaded", bytes=self._done, of=self._total, seconds=round(self._clock() - self._began, 3))
