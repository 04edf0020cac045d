"""Two links are measured in turn, and the faster one is named with both rates."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from kvtransfer.comparison import Comparison, compare
from kvtransfer.link_ops import Measure, Measured
from wire.errors import DeadlineExceeded, PdserveError

MIB = 1 << 20


@dataclass
class FakeLink:
    """A link that answers each measurement at once; it accepts none after `results`."""

    transport: str
    results: list[Measured | PdserveError]
    order: list[tuple[str, int]]
    deadlines: list[float] = field(default_factory=list)

    def measure(self, op: Measure) -> bool:
        self.order.append((self.transport, op.num_bytes))
        self.deadlines.append(op.deadline)
        if self.results:
            op.done(self.results.pop(0))
            return True
        return False


def rate(gb_per_s: float) -> Measured:
    return Measured(1e-4, gb_per_s * 1e9)


def compare_links(new: FakeLink, used: FakeLink | None, clock: Callable[[], float] = lambda: 100.0) -> object:
    found: list[object] = []
    compare(new, used, clock, found.append)  # type: ignore[arg-type]
    (answer,) = found
    return answer


@pytest.mark.parametrize(
    ("new_rate", "used_rate", "faster", "reason"),
    [
        (3.0, 1.0, "new", "slower than new (1.00 GB/s against 3.00 GB/s)"),
        (1.0, 3.0, "used", "slower than used (1.00 GB/s against 3.00 GB/s)"),
        (2.0, 2.0, "used", "slower than used (2.00 GB/s against 2.00 GB/s)"),
    ],
)
def test_the_faster_link_is_named_with_both_rates(new_rate: float, used_rate: float, faster: str, reason: str) -> None:
    order: list[tuple[str, int]] = []
    new = FakeLink("new", [rate(9.0), rate(new_rate)], order)  # the first measurement does not count
    used = FakeLink("used", [rate(used_rate)], order)

    found = compare_links(new, used)

    assert isinstance(found, Comparison)
    assert (found.faster.transport, found.reason) == (faster, reason)
    assert found.measured == rate(max(new_rate, used_rate))
    assert order == [("new", MIB), ("new", 16 * MIB), ("used", 16 * MIB)]
    assert new.deadlines + used.deadlines == [110.0] * 3


@pytest.mark.parametrize(
    ("of_new", "of_used", "message"),
    [
        ([DeadlineExceeded("too slow")], [], "too slow"),
        ([rate(1.0), DeadlineExceeded("too slow")], [], "too slow"),
        ([rate(1.0)], [], "the link over new ended"),
        ([rate(1.0), rate(1.0)], [], "the link over used ended"),
        ([rate(1.0), rate(1.0)], [DeadlineExceeded("a loaded link")], "a loaded link"),
    ],
)
def test_a_link_that_cannot_be_measured_ends_the_comparison(
    of_new: list[Measured | PdserveError], of_used: list[Measured | PdserveError], message: str
) -> None:
    found = compare_links(FakeLink("new", of_new, []), FakeLink("used", of_used, []))

    assert isinstance(found, PdserveError)
    assert str(found) == message


def test_there_is_no_comparison_without_another_link() -> None:
    new = FakeLink("new", [rate(1.0)] * 2, [])

    assert str(compare_links(new, None)) == "no other link is up"
    assert new.order == []
