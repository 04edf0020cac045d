"""The wait before a restart doubles, and too many deaths in the window end the restarts."""

from pdserve.restarts import RestartLimits, Restarts

LIMITS = RestartLimits(max_restarts=4, window_s=100.0, first_wait_s=1.0, longest_wait_s=5.0)


def test_waits_double_to_the_maximum_until_restarts_run_out() -> None:
    restarts = Restarts(LIMITS)

    waits = [restarts.died(float(now)) for now in range(5)]

    assert waits == [1.0, 2.0, 4.0, 5.0, None]
    assert (restarts.deaths, restarts.total) == (5, 4)


def test_deaths_before_the_window_are_forgotten() -> None:
    restarts = Restarts(LIMITS)

    waits = [restarts.died(now) for now in (0.0, 60.0, 100.0, 250.0, 350.0)]

    assert waits == [1.0, 2.0, 2.0, 1.0, 1.0]
    assert (restarts.deaths, restarts.total) == (1, 5)


def test_no_process_is_restarted_if_restarts_are_disabled() -> None:
    assert Restarts(RestartLimits(max_restarts=0)).died(0.0) is None
