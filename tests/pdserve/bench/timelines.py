"""Made-up timelines for tests."""

from collections.abc import Sequence
from itertools import accumulate

from pdserve.bench.load.record import LoadRecord
from pdserve.bench.load.timeline import RequestFailure, Timeline


def made(
    sent_s: float, gaps_s: Sequence[float], *, output_len: int | None = None, input_len: int = 5, queue_s: float = 0.0,
    failure: RequestFailure | None = None, text: str = "hi",
) -> Timeline:  # fmt: skip
    """Return a request that was sent at that time, with pieces after those gaps."""
    pieces = tuple(accumulate(gaps_s, initial=sent_s))[1:]
    tokens = len(gaps_s) if output_len is None else output_len
    end_s = pieces[-1] if pieces else sent_s
    return Timeline(sent_s - queue_s, sent_s, pieces, end_s, input_len, tokens, text, failure)


def record_of(lines: Sequence[Timeline], *, num_requests: int | None = None, began_s: float = 0.0) -> LoadRecord:
    """Return the record of requests that ended in this order."""
    record = LoadRecord(len(lines) if num_requests is None else num_requests)
    record.begin(began_s)
    for number, line in enumerate(lines):
        record.add(number, line, max(line.end_s, record.ended_s))
    return record
