"""The phases of a replacement, from the marks that the new process set."""

import pytest

from pdserve.replacement import Phase, describe, phases_of
from telemetry.start_marks import Mark

_COLD = {
    "process": Mark("process", 11.0, 0.4),
    "weights": Mark("weights", 16.0, 5.0),
    "loaded": Mark("loaded", 18.0, 6.5),
}
_WARM = {
    "warm": Mark("warm", 3.0, 5.0), "process": Mark("process", 10.6, 5.0), "weights": Mark("weights", 10.8, 5.2),
    "loaded": Mark("loaded", 12.0, 6.2), "session": Mark("session", 12.5, 6.5),
}  # fmt: skip


@pytest.mark.parametrize(
    ("marks", "serving", "expected"),
    [
        ({}, None, ()),
        ({}, 14.0, (("serving", 4.0, 0.0),)),
        (_COLD, None, (("process", 6.0, 5.0), ("weights", 2.0, 1.5))),
        (
            _WARM, 13.0,
            (("process", 0.8, 0.2), ("weights", 1.2, 1.0), ("session", 0.5, 0.3), ("serving", 0.5, 0.0)),
        ),
    ],
)  # fmt: skip
def test_phases_begin_at_the_death_and_end_at_marks(
    marks: dict[str, Mark], serving: float | None, expected: tuple[tuple[str, float, float], ...]
) -> None:
    assert phases_of(10.0, marks, serving) == tuple(Phase(*one) for one in expected)


def test_a_description_has_seconds_and_cpu_time() -> None:
    assert (
        describe((Phase("process", 0.8, 0.2), Phase("serving", 0.5, 0.0))) == "process 0.8 s (CPU 0.2 s), serving 0.5 s"
    )
