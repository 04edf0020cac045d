"""The progress line of a running load, on stderr if that is a terminal."""

import sys
from typing import TextIO

from tqdm import tqdm

from pdserve.bench.load.percentiles import percentile
from pdserve.bench.load.record import LoadRecord


class LiveLine:
    """Shows finished requests, errors, output tokens per second and the median TTFT. Owns the terminal line."""

    def __init__(self, num_requests: int, *, shown: bool, file: TextIO | None = None) -> None:
        stream = sys.stderr if file is None else file
        self._shown = shown and stream.isatty()
        self._tokens = 0
        self._ttfts_s: list[float] = []
        self._errors = self._seen = 0
        self._bar = tqdm(total=num_requests, file=stream, disable=not self._shown, unit="req", leave=False)

    def see(self, record: LoadRecord) -> None:
        """Update the line with the latest request of `record`."""
        if not self._shown:
            return
        line = record.lines[next(reversed(record.lines))]
        if line.failure is None:
            self._tokens += line.output_len
            self._ttfts_s.append(line.ttft_s)
        else:
            self._errors += 1
        self._bar.set_postfix_str(self.text(record.duration_s), refresh=False)
        self._bar.update(1)

    def text(self, duration_s: float) -> str:
        """Return the text after the bar."""
        rate = self._tokens / duration_s if duration_s > 0 else 0.0
        ttft = f"{1000 * percentile(self._ttfts_s, 50):.0f} ms" if self._ttfts_s else "-"
        return f"errors: {self._errors}, {rate:.0f} tok/s, p50 TTFT {ttft}"

    def close(self) -> None:
        """Remove the line."""
        self._bar.close()
