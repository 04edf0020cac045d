"""Show the progress of a batch on stderr: a bar on a terminal, else one line every 30 s."""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TextIO

from batch.runner import BatchProgress
from pdserve.batch_run.time_left import TimeLeft

EVERY_S = 30.0
_BAR_EVERY_S = 1.0
_BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} lines [{elapsed}, {rate_fmt}{postfix}]"


class ProgressView:
    """Shows the last BatchProgress. Owns the bar. A closed terminal is ignored.

    Rates cover this run only: lines answered by an earlier run count as done, but not towards the speed.
    """

    def __init__(
        self, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic, max_inflight: int = 1
    ) -> None:  # fmt: skip
        """`max_inflight`: the number of lines in flight."""
        self._stream = stream or sys.stderr
        self._clock = clock
        self._began = clock()
        self._first: BatchProgress | None = None
        self._last: BatchProgress | None = None
        self._left = TimeLeft(max_inflight)
        self._bar: Any = None

    @property
    def seconds(self) -> float:
        """Seconds since the first progress."""
        return self._clock() - self._began

    @property
    def last(self) -> BatchProgress | None:
        """The last progress received."""
        return self._last

    def take(self, progress: BatchProgress) -> None:
        """Store the progress, and update the bar on a terminal."""
        if self._first is None:
            self._first, self._began = progress, self._clock()
        self._last = progress
        self._left.record(self._clock(), progress.done)
        with _ignore_stream_errors():
            if self._stream.isatty():
                self._draw(progress)

    def rates(self) -> tuple[float, float]:
        """Return lines and output tokens per second."""
        if self._first is None or self._last is None or self.seconds <= 0:
            return 0.0, 0.0
        lines = self._last.done - self._first.done
        tokens = self._last.completion_tokens - self._first.completion_tokens
        return lines / self.seconds, tokens / self.seconds

    def line(self) -> str:
        """Return the progress in one line."""
        if self._last is None:
            return "0 lines answered"
        lines, tokens = self.rates()
        return (
            f"{self._last.done:,} of {self._last.total:,} lines, {_counted_errors(self._last)}, "
            f"{lines:.1f} lines/s, {tokens:.1f} tokens/s, {self._left_of(self._last)}{_limit(self._last)}"
        )

    @contextlib.asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Show the progress periodically, even without new answers; close the bar on exit."""
        task = asyncio.create_task(self._keep_updating())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            with _ignore_stream_errors():
                if self._bar is not None:
                    self._bar.close()

    async def _keep_updating(self) -> None:
        while True:
            is_bar = self._stream.isatty()
            await asyncio.sleep(_BAR_EVERY_S if is_bar else EVERY_S)
            with _ignore_stream_errors():
                if not is_bar:
                    print(self.line(), file=self._stream, flush=True)
                elif self._last is not None:
                    self._draw(self._last)
                    self._bar.refresh()

    def _draw(self, progress: BatchProgress) -> None:
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(
                total=progress.total, initial=progress.done, file=self._stream, unit=" lines", dynamic_ncols=True,
                bar_format=_BAR,
            )  # fmt: skip
        self._bar.set_postfix_str(
            f"{self.rates()[1]:.1f} tokens/s, {self._left_of(progress)}, {_counted_errors(progress)}{_limit(progress)}",
            refresh=False,
        )
        self._bar.update(progress.done - self._bar.n)

    def _left_of(self, progress: BatchProgress) -> str:
        left = self._left.seconds(self._clock(), progress.total)
        return f"{'?' if left is None else _format_duration(left)} left"


@contextlib.contextmanager
def _ignore_stream_errors() -> Iterator[None]:
    """Ignore errors of the progress stream: a batch continues without its terminal."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: the stream is closed
        yield


def _counted_errors(progress: BatchProgress) -> str:
    return f"{progress.errors:,} error{'' if progress.errors == 1 else 's'}"


def _limit(progress: BatchProgress) -> str:
    """Return the limit on lines in flight while the server is busy, empty otherwise."""
    return "" if progress.at_once is None else f", at most {progress.at_once} at once: the server is busy"


def _format_duration(seconds: float) -> str:
    """Return `42s`, `3m10s`, `2h05m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
