"""The send and receive times of one request, and its latencies."""

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """Why a request has no complete answer: a kind, by which failures are counted, and a message."""

    kind: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}" if self.message else self.kind


@dataclass(frozen=True, slots=True)
class Timeline:
    """One request, its times in seconds of one clock; token counts are the server's own (`usage`).

    A piece is a stream event with output of one or more tokens. `due_s` is when the load planned
    to send the request, `sent_s` when --max-concurrency allowed it.
    """

    due_s: float
    sent_s: float
    pieces_s: tuple[float, ...] = ()
    end_s: float = 0.0
    input_len: int = 0
    output_len: int = 0
    text: str = ""
    failure: RequestFailure | None = None

    @property
    def queue_s(self) -> float:
        """The wait in the client."""
        return self.sent_s - self.due_s

    @property
    def ttft_s(self) -> float:
        """From sending to the first piece; 0 if there was none."""
        return self.pieces_s[0] - self.sent_s if self.pieces_s else 0.0

    @property
    def e2el_s(self) -> float:
        """From sending to the end of the answer."""
        return self.end_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """The average time of each token after the first; None for an answer of one token."""
        return (self.e2el_s - self.ttft_s) / (self.output_len - 1) if self.output_len > 1 else None

    @property
    def itls_s(self) -> tuple[float, ...]:
        """The gaps between its pieces."""
        return tuple(after - before for before, after in pairwise(self.pieces_s))

    @property
    def longest_gap_s(self) -> float:
        """The longest wait for a piece after the first; 0 if there was none."""
        return max(self.itls_s, default=0.0)
