"""A wait for a device's work is limited by the time in which the process could run."""

import itertools

import pytest

from devices.polling import wait_until


@pytest.mark.parametrize(("run_s", "is_in_time"), [(0.0, True), (1.0, False)])
def test_a_starved_waiter_does_not_blame_the_device(
    run_s: float, is_in_time: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By wall time the limit passes long before the 100th poll, when the work is done; `run_s` passes between two."""
    looks, times = itertools.count(), itertools.count(0.0, run_s)
    monkeypatch.setattr("devices.polling.run_time", lambda: next(times))

    assert wait_until(lambda: next(looks) == 100, 1e-4) is is_in_time
