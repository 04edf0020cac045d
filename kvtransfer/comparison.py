"""Compares a link that carries no tickets yet with the one in use, by measuring one after the other."""

from collections.abc import Callable
from dataclasses import dataclass

from kvtransfer.link import Link
from kvtransfer.link_ops import Measure, Measured
from wire.errors import PdserveError, Unavailable
from wire.link_reasons import slower_reason

_FIRST_BYTES = 1 << 20  # not counted: some transports connect at the first frame
_NUM_BYTES = 16 << 20
_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Which of two links carries more bytes per second; `measured` is the faster one's measurement."""

    faster: Link
    slower: Link
    measured: Measured
    slower_bytes_per_s: float

    @property
    def reason(self) -> str:
        """Why the slower one is not used, with both rates."""
        return slower_reason(self.faster.transport, self.slower_bytes_per_s, self.measured.bytes_per_s)


def compare(
    new: Link, used: Link | None, clock: Callable[[], float], done: Callable[[Comparison | PdserveError], None]
) -> None:
    """Measure both links; `done` is called once, on a thread of one of the links or the caller's.

    Tickets on the link in use are sent between the frames of its measurement, of which at most 4 MiB are in flight.
    """
    if used is None:
        done(Unavailable("no other link is up"))
        return
    steps, results = [(new, _FIRST_BYTES), (new, _NUM_BYTES), (used, _NUM_BYTES)], list[Measured]()

    def measure_next() -> None:
        link, num_bytes = steps[len(results)]
        if not link.measure(Measure(num_bytes, clock() + _TIMEOUT_S, handle)):
            done(Unavailable(f"the link over {link.transport} ended"))

    def handle(found: Measured | PdserveError) -> None:
        if isinstance(found, PdserveError):
            done(found)
            return
        results.append(found)
        if len(results) < len(steps):
            measure_next()
            return
        of_new, of_used = results[1:]
        if of_new.bytes_per_s > of_used.bytes_per_s:
            done(Comparison(new, used, of_new, of_used.bytes_per_s))
        else:
            done(Comparison(used, new, of_used, of_new.bytes_per_s))

    measure_next()
