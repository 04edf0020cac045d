"""The limits of one transfer."""

import pytest

from remote_files.limits import Retries, Waits


@pytest.mark.parametrize(
    ("failures", "jitter", "delay_s"), [(1, 0, 1), (2, 0, 2), (3, 0, 4), (4, 0, 5), (9, 0, 5), (3, 1, 2)]
)
def test_delays_double_up_to_the_longest_and_jitter_takes_up_to_half(
    failures: int, jitter: float, delay_s: float
) -> None:
    assert Retries(first_delay_s=1, max_delay_s=5).delay_s(failures, jitter) == delay_s


def test_the_minimum_speed_is_one_byte_a_window() -> None:
    assert Waits(idle_s=30, floor_bytes_per_s=1024).window_bytes == 30_720
    assert Waits(idle_s=0.1, floor_bytes_per_s=0).window_bytes == 1
