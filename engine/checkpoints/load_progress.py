"""Shows the progress of loading, in bytes: a bar on a terminal, else periodic log lines."""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TextIO

from tqdm import tqdm

from telemetry.logs import EventLogger

_log = EventLogger("engine")

_LINE_S = 2.0


class LoadProgress:
    """Owns the progress bar of one load; leaving `with` closes it."""

    def __init__(
        self, total_bytes: int, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`stream` is by default the current stderr: the one at import may be closed."""
        self._total, self._done, self._clock = total_bytes, 0, clock
        stream = sys.stderr if stream is None else stream
        self._began = self._logged = clock()
        self._bar: Any = None
        if stream.isatty():
            self._bar = tqdm(total=total_bytes, unit="B", unit_scale=True, desc="weights", file=stream, leave=False)

    def advance(self, num_bytes: int) -> None:
        """Count `num_bytes` more as loaded."""
        self._done += num_bytes
        if self._bar is not None:
            self._bar.update(num_bytes)
        elif self._clock() - self._logged >= _LINE_S:
            self._logged = self._clock()
            self._log()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        if error is None:
            self._log()

    def _log(self) -> None:
        _log.info("weights_loaded", bytes=self._done, of=self._total, seconds=round(self._clock() - self._began, 3))
